"""The next token of each sequence: logits processors, filters, random numbers, grammar masks."""
