"""Models that think aloud: how each family tells its reasoning from its answer, and how that is read."""
