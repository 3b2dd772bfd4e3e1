"""The names of things that cross a process.

They are strings and integers at run time, and distinct types to the type checker.
"""

from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
Epoch = NewType("Epoch", int)
"""The number of the attempt at a request. A message of an older epoch is stale: it is dropped and counted."""
Incarnation = NewType("Incarnation", str)
"""A value drawn anew at each start of a process, so that a restarted worker is not taken for its former self."""
BlockId = NewType("BlockId", int)
