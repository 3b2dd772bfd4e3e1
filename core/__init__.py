"""What an engine core runs: one loop, the ledger of accepted requests, and the roles that give it work."""
