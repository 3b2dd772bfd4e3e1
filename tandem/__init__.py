"""The command line, the local supervisor, and the way into every process."""
