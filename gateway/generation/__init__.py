"""One answer on its way to the client: tokens in order, their text, what is read out of it, its time."""
