"""What sessions store: their records, restoration after a restart, QoS 2 after the commit."""
