"""Stand-ins for real parts, for tests and benchmarks; they pass the real parts' contract tests."""
