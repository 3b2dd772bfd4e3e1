"""A local system to measure, and what it uses."""
