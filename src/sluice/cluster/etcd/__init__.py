"""As much of etcd's API as a cluster needs: keys, leases and watches."""
