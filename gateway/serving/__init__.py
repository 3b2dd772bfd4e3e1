"""One request of a client, from placement to the last byte."""
