"""The retained messages, and their way to new subscriptions."""
