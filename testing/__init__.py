"""Stand-ins for real parts, for tests and benchmarks; they pass the contract tests of what they stand in for."""
