"""What both devices need of a layer: rotary embedding, chunked attention, the rows that need logits."""
