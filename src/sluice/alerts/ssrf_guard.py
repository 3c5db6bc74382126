"""Which addresses webhooks may reach: public ones, and those that the configuration allows."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]

# Not public, also if the tables of this Python version say otherwise.
_NON_PUBLIC_NETWORKS: Final = tuple(
    ipaddress.ip_network(one)
    for one in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "169.254.0.0/16",  # link-local, with the metadata services of clouds
        "192.0.0.0/24",
        "198.18.0.0/15",
        "168.63.129.16/32",  # metadata service of a cloud, on a public address
        "3fff::/20",  # documentation
    )
)
# All IPv6 addresses that are routed globally today; the tables miss some that are not.
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
# IPv6 addresses that contain an IPv4 address: checked by that.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class AddressRefused(Exception):
    """A webhook whose address is not allowed."""


class SsrfGuard:
    """Decides which addresses webhooks may reach.

    `allowed` contains networks, addresses and host names. An allowed name is trusted with any
    address.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed_hosts = {one.lower() for one in allowed if _parse_network(one) is None}
        self._allowed_networks = [
            network for one in allowed if (network := _parse_network(one)) is not None
        ]

    def fault_of_address(self, address: str) -> str:
        """Return why this address is not allowed, or an empty string."""
        found = _extract_ipv4(ipaddress.ip_address(address.partition("%")[0]))
        if any(found in network for network in self._allowed_networks):
            return ""
        public = (
            found.is_global
            and not found.is_multicast
            and (found.version == 4 or found in _GLOBAL_UNICAST)
        )
        if public and not any(found in closed for closed in _NON_PUBLIC_NETWORKS):
            return ""
        return (
            f"{address} is not a public address: add it to webhooks.allow if alerts should go there"
        )

    def fault_of_url(self, url: str) -> str:
        """Return what is wrong with a webhook before its name is resolved, or an empty string."""
        import httpx

        try:
            found = httpx.URL(url)
            host, port = found.host, found.port
        except (httpx.InvalidURL, UnicodeError):  # UnicodeError: invalid punycode
            return "the webhook is not a URL"
        if not host:
            return "the webhook has no host"
        if port is not None and not 0 < port < 65_536:
            return f"the webhook has port {port}: ports go from 1 to 65535"
        if host.lower().rstrip(".") in self._allowed_hosts:
            return ""
        try:
            return self.fault_of_address(host)
        except ValueError:  # a name, checked when it is used; these names are always local
            local = host.lower().rstrip(".") == "localhost" or host.lower().rstrip(".").endswith(
                ".localhost"
            )
            return (
                f"{host} is this machine: add it to webhooks.allow if alerts should go there"
                if local
                else ""
            )

    async def find_allowed_address(self, host: str, port: int, resolve: Resolve) -> str:
        """Return an allowed address of `host`, or raise AddressRefused."""
        trusted = host.lower().rstrip(".") in self._allowed_hosts
        faults = []
        for address in await resolve(host, port):
            fault = "" if trusted else self.fault_of_address(address)
            if not fault:
                return address
            faults.append(fault)
        raise AddressRefused(f"{host}: {faults[0]}" if faults else f"{host} has no address")


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a name from the system's resolver; a literal address is its own."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(one[4][0]) for one in found]


def _parse_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _extract_ipv4(address: Address) -> Address:
    """Return the IPv4 address inside an IPv6 address, for all kinds of embedding."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _NAT64 or int(address) >> 32 == 0:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.teredo is not None:
            return ipaddress.IPv4Address("0.0.0.0")  # a tunnel to any address: never allowed
    return address
