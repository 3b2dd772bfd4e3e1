"""Every operation in plain torch, fp32 inside, on any device: the oracle of all others."""
