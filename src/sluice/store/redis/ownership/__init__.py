"""The ownership of a store: lease and fence token, and the process that holds them."""

from sluice.store.redis.ownership.lease import LeaseRenewer, StoreLease, read_owner
from sluice.store.redis.ownership.process_identity import ProcessIdentity, owner_name

__all__ = ["LeaseRenewer", "ProcessIdentity", "StoreLease", "owner_name", "read_owner"]
