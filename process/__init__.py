"""This process and its machine: sockets, supervision, memory, timers, the garbage collector."""
