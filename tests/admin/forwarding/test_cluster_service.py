"""The admin service of a node with several cells."""

from __future__ import annotations

import inspect

from sluice.admin.bulk import BulkService
from sluice.admin.forwarding.cluster_service import ClusterAdminService, ClusterBulkService
from sluice.admin.service import AdminService


def test_every_operation_is_forwarded_to_cells() -> None:
    for single, clustered in (
        (AdminService, ClusterAdminService),
        (BulkService, ClusterBulkService),
    ):
        operations = {
            name
            for name, method in vars(single).items()
            if inspect.iscoroutinefunction(method) and not name.startswith("_")
        }
        # `nodes` asks `node`, which is replaced.
        assert operations - vars(clustered).keys() - {"nodes"} == set()
