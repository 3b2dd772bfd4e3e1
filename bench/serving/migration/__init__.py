"""The benchmark of live migration, and the processes that move answers, or halt, when it says so."""
