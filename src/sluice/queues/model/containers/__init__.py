"""Data structures of the model on native arrays; they know no queues."""
