"""Which workers serve a request: the policy, without Redis, sockets or a clock."""
