"""Build the parts of a cluster from its settings: coordinator, links, link key and node info.

This module knows settings and constructors only. It starts nothing and keeps no state.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice.cluster.membership import (
    LEASE_SECONDS,
    CoordinationKv,
    Coordinator,
    Membership,
    NodeInfo,
    ProcessKv,
)
from sluice.cluster.settings import ClusterSettings
from sluice.cluster.transport import LinkKey, LinkOptions, LinkTls, PeerLinks
from sluice.errors import ConfigError
from sluice.units import Address, parse_address


@dataclass(frozen=True)
class ProcessSlot:
    """The place of this process among the processes of one node."""

    number: int  # from 1 on
    count: int  # of processes
    channel: socket.socket  # to the supervisor
    link_path: Path  # the Unix socket for links from the other processes
    upload_path: Path  # a directory for uploads to this process

    @property
    def name(self) -> str:
        return process_name(self.number)


def process_name(number: int) -> str:
    return f"process-{number}"


def make_coordinator(settings: ClusterSettings, store: str, prefix: str) -> Membership:
    """Return the coordinator that the settings select.

    `store` and `prefix` are the URL and key prefix of Redis, which can also be the coordinator.
    """
    return Membership(make_kv(settings, store, prefix), settings.cells, settings.etcd_lease_ttl)


def make_process_coordinator(kv: ProcessKv, slot: ProcessSlot, cells: int) -> Membership:
    """Return the coordinator of a process: its supervisor, and cells that do not move."""
    names = tuple(process_name(number) for number in range(1, slot.count + 1))
    return Membership(kv, cells, LEASE_SECONDS, names)


def make_kv(settings: ClusterSettings, store: str, prefix: str) -> CoordinationKv:
    if settings.coordinator == "etcd":
        from sluice.cluster.etcd import EtcdClient, EtcdKv, EtcdTls

        tls = None
        if settings.etcd_ca is not None:
            certificate = (
                settings.etcd_cert.read_bytes() if settings.etcd_cert is not None else None
            )
            key = settings.etcd_key.read_bytes() if settings.etcd_key is not None else None
            tls = EtcdTls(settings.etcd_ca.read_bytes(), certificate, key)
        return EtcdKv(EtcdClient(settings.etcd_endpoints, tls), settings.name)
    try:
        from sluice.cluster.membership.redis_kv import RedisKv
    except ImportError as missing:
        raise ConfigError(
            f"the cluster coordinator needs a package that is not installed: {missing.name}",
            "Install sluice[redis]",
        ) from missing
    return RedisKv(store, prefix, settings.name)


def make_peer_links(
    settings: ClusterSettings,
    owner_of: Callable[[int], NodeInfo | None],
    path: Path | None = None,
) -> PeerLinks:
    """Return the links, over a Unix socket if there is a `path` for it."""
    tls = None
    if (
        settings.tls_cert is not None
        and settings.tls_key is not None
        and settings.tls_ca is not None
    ):
        tls = LinkTls(settings.tls_cert, settings.tls_key, settings.tls_ca)
    options = LinkOptions(
        settings.listen, settings.name, settings.heartbeat, settings.silence, tls, path
    )
    return PeerLinks(options, owner_of)


async def make_link_key(settings: ClusterSettings, coordinator: Coordinator) -> LinkKey:
    """Derive the link key from the configured secret, or from the coordinator's shared secret."""
    secret = settings.link_secret() or await coordinator.shared_secret()
    return await asyncio.to_thread(LinkKey, secret, settings.name)


def node_info(
    settings: ClusterSettings,
    link: str,
    mqtt: str = "",
    http: str = "",
    grpc: str = "",
    key: str = "",
) -> NodeInfo:
    """Describe a new incarnation of this node. The addresses are those of its listeners."""
    name = settings.node or f"{socket.gethostname()}:{parse_address(link).port}"
    return NodeInfo(
        id=f"{name}-{os.urandom(4).hex()}",
        name=name,
        link=str(settings.advertise_link or _advertised_address(settings, link)),
        mqtt=_advertised_address(settings, mqtt),
        http=_advertised_address(settings, http),
        grpc=_advertised_address(settings, grpc),
        started_at=time.time(),
        key=key,
    )


def _advertised_address(settings: ClusterSettings, address: str) -> str:
    """Return `address` with its host replaced by the advertised host of this node."""
    if not address or not settings.advertise:
        return address
    return str(Address(settings.advertise, parse_address(address).port))
