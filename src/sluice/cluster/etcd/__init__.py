"""The part of etcd's API that a cluster needs: keys, leases and watches."""

from sluice.cluster.etcd.etcd_client import EtcdClient, EtcdTls
from sluice.cluster.etcd.etcd_kv import EtcdKv

__all__ = [
    "EtcdClient",
    "EtcdKv",
    "EtcdTls",
]
