"""Names of things that cross a process. Strings and integers at run time, distinct to the type checker."""

from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
Epoch = NewType("Epoch", int)
"""Counts the attempts at one request. A message of an older epoch is a zombie: dropped and counted."""
Incarnation = NewType("Incarnation", str)
"""Drawn anew at each start of a process, so that a restarted worker is never taken for its former self."""
BlockId = NewType("BlockId", int)
