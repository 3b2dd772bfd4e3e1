"""Tenants: who a key belongs to, what each may take, and what each has taken."""
