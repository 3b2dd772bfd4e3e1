"""The APIs that clients speak: what they may send and how answers are written."""
