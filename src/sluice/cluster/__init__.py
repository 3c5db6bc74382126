"""Several nodes that are one broker: who is there, who owns what, and the lines between them."""
