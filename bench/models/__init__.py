"""Models to measure with: random weights, folders of them, and the oracle."""
