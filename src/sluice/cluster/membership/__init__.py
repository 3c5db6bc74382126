"""Which nodes live, which cells each owns, and where names are."""

from sluice.cluster.membership.coordinator import (
    LINK_PROTOCOL_VERSION,
    Coordinator,
    CoordinatorError,
    NodeInfo,
    names_avoiding,
    names_with_cells,
)
from sluice.cluster.membership.directory import Directory
from sluice.cluster.membership.kv import Change, CoordinationKv, CoordinatorUnavailable, Lease
from sluice.cluster.membership.membership import Membership
from sluice.cluster.membership.placement import place_cells
from sluice.cluster.membership.process_kv import LEASE_SECONDS, ProcessKv

__all__ = [
    "LEASE_SECONDS",
    "LINK_PROTOCOL_VERSION",
    "Change",
    "CoordinationKv",
    "Coordinator",
    "CoordinatorError",
    "CoordinatorUnavailable",
    "Directory",
    "Lease",
    "Membership",
    "NodeInfo",
    "ProcessKv",
    "names_avoiding",
    "names_with_cells",
    "place_cells",
]
