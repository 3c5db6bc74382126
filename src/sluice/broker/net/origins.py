"""Allowed origins: which web pages may open a WebSocket to this server.

A browser opens a WebSocket for any page, to any address that it can reach, and names the page in
`Origin`. Where a client needs no credentials, every page would have the rights of an anonymous
client on this machine. So such a listener admits only pages of this machine and the pages that the
operator lists. A program sends no `Origin` and is always admitted.

A page can also make its own name resolve to an address of this machine (DNS rebinding). Then
`Origin` and `Host` agree, and only the name shows that the page is foreign. So the listener admits
addresses and rejects names that others can register.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

ANY = "*"


class AllowedOrigins:
    """Decide about origins.

    `allowed` lists origins such as `https://app.example.org`, or `*`. `needs_no_credentials` is
    true for a listener where a page gets in without a secret.
    """

    def __init__(
        self, allowed: Collection[str], needs_no_credentials: bool, host: str = "localhost"
    ) -> None:
        self._allowed = {one.lower().rstrip("/") for one in allowed}
        self._needs_no_credentials = needs_no_credentials
        self._local_names = {"localhost", host.lower(), socket.gethostname().lower()}

    def handshake_error(self, origin: str | None, host: str) -> str:
        """Return why a handshake with these headers is refused, or an empty string if it is not."""
        if origin is None or ANY in self._allowed or origin.lower() in self._allowed:
            return ""
        if not self._needs_no_credentials and not self._allowed:
            return ""
        server_host = _host_of(f"//{host}")
        page_host = _host_of(origin)
        if self._is_local(page_host) or (
            page_host and page_host == server_host and _is_address(page_host)
        ):
            if self._is_local(server_host) or _is_address(server_host):
                return ""
            return (
                f"This server is not called {host}. Use its address or localhost, "
                "or add the page's origin to mqtt.ws_origins."
            )
        return (
            f"Pages of {origin} may not connect here. Add the origin to mqtt.ws_origins, "
            "or set up users, so that a page needs credentials."
        )

    def _is_local(self, name: str) -> bool:
        return name in self._local_names or (_is_address(name) and ip_address(name).is_loopback)


def origin_error(text: str) -> str:
    """Return why `text` is invalid in `mqtt.ws_origins`, or an empty string if it is valid."""
    if text in (ANY, "null"):
        return ""
    try:
        parts = urlsplit(text)
        fits = bool(parts.scheme and parts.hostname) and parts.path in ("", "/") and not parts.query
    except ValueError:
        fits = False
    return (
        "" if fits else "an origin is a scheme, a host and perhaps a port: https://app.example.org"
    )


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


ANY_ORIGIN = AllowedOrigins([ANY], False)
