"""Checks the settings of a Redis server for risks to durability, for the operator."""

from __future__ import annotations


def durability_warnings(server_info: dict[str, str], settings: dict[str, str]) -> list[str]:
    """Return one sentence for each setting that can lose acknowledged messages."""
    warnings: list[str] = []
    if not settings:
        warnings.append(
            "Redis does not show its configuration (CONFIG is not allowed): "
            "make sure that appendonly is yes and maxmemory-policy is noeviction"
        )
    if settings.get("appendonly", "yes") == "no":
        warnings.append(
            "Redis keeps no append-only file (appendonly no): "
            "a restart of Redis loses acknowledged messages. "
            "Set appendonly yes, and appendfsync always to lose nothing in a power cut"
        )
    elif settings.get("appendfsync", "always") != "always":
        warnings.append(
            f"Redis writes its append-only file with appendfsync {settings['appendfsync']}: "
            "a power cut may lose messages acknowledged in the last second. "
            "Set appendfsync always to lose nothing"
        )
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction" and settings.get("maxmemory", "0") != "0":
        warnings.append(
            f"Redis evicts keys when its memory is full (maxmemory-policy {policy}): "
            "messages may be lost. Set maxmemory-policy noeviction"
        )
    replicas = int(server_info.get("connected_slaves", "0"))
    if replicas and settings.get("min-replicas-to-write", "") == "0":
        warnings.append(
            f"Redis has replicas ({replicas}) and does not wait for them "
            "(min-replicas-to-write 0): a failover to a replica that is behind loses "
            "acknowledged messages. "
            "Set min-replicas-to-write and min-replicas-max-lag"
        )
    if server_info.get("role") == "slave":
        warnings.append(
            "This Redis is a replica and accepts no writes. Use the address of its master"
        )
    return warnings
