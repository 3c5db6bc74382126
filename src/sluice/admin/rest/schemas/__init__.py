"""JSON of the resources, of bulk requests and of the configuration."""
