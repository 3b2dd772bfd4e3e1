"""Both halves of a handoff, for any role that sends or receives the KV of a request."""
