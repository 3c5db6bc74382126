"""The gRPC door: `QueueAdmin` as queue_admin.proto describes it, with health and reflection."""
