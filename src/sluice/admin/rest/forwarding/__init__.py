"""Carries requests to the other nodes of a cluster."""
