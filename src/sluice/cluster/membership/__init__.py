"""Which nodes live, which cells each owns, and where names are."""

from sluice.cluster.membership.coordinator import (
    LINK_PROTOCOL_VERSION,
    Coordinator,
    CoordinatorError,
    NodeInfo,
    names_avoiding,
)
from sluice.cluster.membership.directory import Directory
from sluice.cluster.membership.kv import Change, CoordinationKv, CoordinatorUnavailable, Lease
from sluice.cluster.membership.membership import Membership
from sluice.cluster.membership.placement import place_cells

__all__ = [
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
    "names_avoiding",
    "place_cells",
]
