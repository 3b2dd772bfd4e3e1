"""The connection of two nodes: listener, handshake, frames and control connection."""
