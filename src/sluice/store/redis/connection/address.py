"""The address of a store in Redis: one server, nodes of a Redis Cluster, or Sentinels.

    redis://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][/DATABASE][?OPTIONS]
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,...]/MASTER[/DATABASE][?OPTIONS]

With `rediss` instead of `redis` the connections use TLS, to the Sentinels too. Several hosts
without Sentinel are nodes of a Redis Cluster, so that a start does not depend on one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from sluice.errors import StoreError

_SENTINEL_SUFFIX: Final = "+sentinel"
_SCHEMES: Final = ("redis", "rediss")
REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379


@dataclass(frozen=True, slots=True)
class RedisAddress:
    scheme: str
    hosts: tuple[str, ...]  # with ports
    credentials: str  # `USER:PASSWORD` as in the URL
    database: str
    options: tuple[tuple[str, str], ...]
    master: str = ""  # as the Sentinels name it; empty without Sentinel
    sentinel_credentials: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        scheme, _, _ = url.partition("://")
        is_sentinel = scheme.endswith(_SENTINEL_SUFFIX)
        scheme = scheme.removesuffix(_SENTINEL_SUFFIX)
        parts = urlsplit(url)
        credentials, _, netloc = parts.netloc.rpartition("@")
        default_port = SENTINEL_PORT if is_sentinel else REDIS_PORT
        hosts = tuple(_with_port(host, default_port) for host in netloc.split(","))
        path = parts.path.strip("/").split("/")
        master = path.pop(0) if is_sentinel else ""
        if scheme not in _SCHEMES or not all(hosts) or (is_sentinel and not master):
            raise StoreError(
                "the address of the store is not one of Redis",
                "Write redis://HOST:PORT, redis://HOST:PORT,HOST:PORT for a Redis Cluster, or "
                "redis+sentinel://HOST:PORT,HOST:PORT/MASTER",
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        sentinel_user = options.pop("sentinel_username", "")
        sentinel_password = options.pop("sentinel_password", "")
        return cls(
            scheme,
            hosts,
            credentials,
            "/".join(path),
            tuple(options.items()),
            master,
            f"{quote(sentinel_user, '')}:{quote(sentinel_password, '')}"
            if sentinel_password
            else "",
        )

    def server_url(self, host: str) -> str:
        """Return the URL of a Redis server at `host`, which contains its port."""
        return self._url(host, self.credentials, self.database)

    def sentinel_url(self, host: str) -> str:
        return self._url(host, self.sentinel_credentials, "")

    def _url(self, host: str, credentials: str, database: str) -> str:
        at = f"{credentials}@" if credentials else ""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.scheme}://{at}{host}/{database}{query}"


def _with_port(host: str, default: int) -> str:
    if not host or host.startswith(":"):
        return ""
    name, _, port = host.rpartition(":")
    return host if name and port.isdecimal() else f"{host}:{default}"
