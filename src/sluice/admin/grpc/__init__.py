"""The gRPC API: `QueueAdmin` as queue_admin.proto describes it, with health and reflection."""
