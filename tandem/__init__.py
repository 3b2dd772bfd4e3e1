"""The command line, the local supervisor, and the entry to every process."""
