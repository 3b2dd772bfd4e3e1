"""What the process of every service shares: its settings' words, its signals, its HTTP server, its door."""
