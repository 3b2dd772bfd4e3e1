"""How two nodes meet: listener, handshake, frames and the control connection."""
