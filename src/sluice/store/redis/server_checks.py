"""Whether this Redis keeps what it is given: what its own settings say, in words for the operator."""

from __future__ import annotations


def durability_warnings(server_info: dict[str, str], settings: dict[str, str]) -> list[str]:
    """One sentence for each setting under which something acknowledged can be lost."""
    warnings: list[str] = []
    if not settings:
        warnings.append(
            "Redis does not tell its configuration (CONFIG is not allowed): "
            "make sure that appendonly is yes and maxmemory-policy is noeviction"
        )
    if settings.get("appendonly", "yes") == "no":
        warnings.append(
            "Redis keeps no append-only file (appendonly no): a restart of Redis loses what was acknowledged. "
            "Set appendonly yes, and appendfsync always to lose nothing in a power cut"
        )
    elif settings.get("appendfsync", "always") != "always":
        warnings.append(
            f"Redis writes its append-only file with appendfsync {settings['appendfsync']}: "
            "a power cut may lose the last second of what was acknowledged. Set appendfsync always to lose nothing"
        )
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction" and settings.get("maxmemory", "0") != "0":
        warnings.append(
            f"Redis throws keys away when its memory is full (maxmemory-policy {policy}): messages may vanish. "
            "Set maxmemory-policy noeviction"
        )
    replicas = int(server_info.get("connected_slaves", "0"))
    if replicas and settings.get("min-replicas-to-write", "") == "0":
        warnings.append(
            f"Redis has replicas ({replicas}) and writes without waiting for them (min-replicas-to-write 0): "
            "a failover to a replica that is behind loses what was acknowledged. "
            "Set min-replicas-to-write and min-replicas-max-lag"
        )
    if server_info.get("role") == "slave":
        warnings.append(
            "This Redis is a replica and takes no writes. Give the address of its master"
        )
    return warnings
