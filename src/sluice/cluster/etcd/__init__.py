"""The part of etcd's API that a cluster needs: keys, leases and watches."""
