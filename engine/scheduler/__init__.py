"""Which sequences run in the next step. Imports no torch and reads no clock."""
