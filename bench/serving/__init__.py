"""Whole systems over HTTP: pairs, gateways, soak and chaos."""
