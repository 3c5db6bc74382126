"""Run several nodes as one broker: membership, cell ownership, and the links between nodes."""
