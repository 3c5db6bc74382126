"""A cluster as one service: the cells of this node, and the other nodes."""

from sluice.admin.forwarding.cluster_service import ClusterAdminService

__all__ = [
    "ClusterAdminService",
]
