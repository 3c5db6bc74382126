"""Which web pages may open a WebSocket to this server.

A browser opens a WebSocket for any page, to any address that it can reach, and names the page in
`Origin`. Where a client needs no credentials, every page would have the rights of an anonymous
client on this machine. So such a listener admits only pages of this machine, besides those that the
operator names. A program sends no `Origin` and is always admitted.

A page can also have its own name resolve to an address of this machine (DNS rebinding). Then
`Origin` and `Host` agree, and only the name tells that the page is a foreign one: names that others
can register are not admitted, addresses are.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

ANY = "*"


class Origins:
    """`named`: origins such as `https://app.example.org`, or `*`. `ambient`: a page needs no secret to get in."""

    def __init__(self, named: Collection[str], ambient: bool, host: str = "localhost") -> None:
        self._named = {one.lower().rstrip("/") for one in named}
        self._ambient = ambient
        self._own_names = {"localhost", host.lower(), socket.gethostname().lower()}

    def fault_of(self, origin: str | None, host: str) -> str:
        """Return why a handshake with these headers is refused; the empty string when it is not."""
        if origin is None or ANY in self._named or origin.lower() in self._named:
            return ""
        if not self._ambient and not self._named:
            return ""
        here = _host_in(f"//{host}")
        page = _host_in(origin)
        if self._is_own(page) or (page and page == here and _is_address(page)):
            if self._is_own(here) or _is_address(here):
                return ""
            return (
                f"This server is not called {host}. Use its address or localhost, "
                "or add the page's origin to mqtt.ws_origins."
            )
        return (
            f"Pages of {origin} may not connect here. Add the origin to mqtt.ws_origins, "
            "or set up users, so that a page needs credentials."
        )

    def _is_own(self, name: str) -> bool:
        return name in self._own_names or (_is_address(name) and ip_address(name).is_loopback)


def fault_of_origin(text: str) -> str:
    """Return why this cannot stand in `mqtt.ws_origins`; the empty string when it can."""
    if text in (ANY, "null"):
        return ""
    try:
        parts = urlsplit(text)
        fits = bool(parts.scheme and parts.hostname) and parts.path in ("", "/") and not parts.query
    except ValueError:
        fits = False
    return "" if fits else "an origin is a scheme, a host and perhaps a port: https://app.example.org"


def _host_in(url: str) -> str:
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


ANY_ORIGIN = Origins([ANY], False)
