"""The engine core: one loop, the table of accepted attempts, and the roles that give it work."""
