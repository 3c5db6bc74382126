"""A cluster as one service: the cells of this node, and the way to the owners of the others."""

from sluice.admin.forwarding.cluster_service import CellMoved, ClusterAdminService
from sluice.admin.forwarding.owner_routing import (
    GATHER_TIMEOUT_SECONDS,
    CellUnreachable,
    OwnerAttempts,
)

__all__ = [
    "GATHER_TIMEOUT_SECONDS",
    "CellMoved",
    "CellUnreachable",
    "ClusterAdminService",
    "OwnerAttempts",
]
