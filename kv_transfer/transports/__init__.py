"""Ways to carry staged bytes from one process to another, behind the interface in base.py."""
