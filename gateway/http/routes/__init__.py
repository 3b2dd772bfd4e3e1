"""The endpoints, each subject as a router of its own."""
