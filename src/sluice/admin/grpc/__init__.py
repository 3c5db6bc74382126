"""The gRPC API: `QueueAdmin` as queue_admin.proto describes it, with health and reflection.

Programs import the generated modules to call it. Only a broker with an open gRPC listener imports
`server`.
"""

__all__ = ["queue_admin_pb2", "queue_admin_pb2_grpc", "server"]
