"""How people write addresses and durations, and how Sluice writes them back.

Part of the floor: configuration files, flags and queue settings all use the same notation. A value that cannot be
read raises ValueError with the sentence to show; whoever knows the key puts its name in front.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import quote

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Port 0 lets the system pick a free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name counts as public unless it is the one that never is."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read `host:port`. An IPv6 host stands in brackets, because its colons are not the port's.

    The host is never guessed: "every interface" and "this machine only" differ by who can reach the broker.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host:
        raise ValueError(
            f"{text!r} is not HOST:PORT; write 127.0.0.1:1883 for this machine only, 0.0.0.0:1883 for all interfaces"
        )
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} has an IPv6 host without brackets; write [{host}]:{port}")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(
            f"{text!r} is not HOST:PORT; the port is a number from 0 (any free one) to 65535"
        )
    return Address(host, int(port))


def parse_duration(value: object) -> float:
    """Read "200ms", "5s", "5m", "3h" or "7d" as seconds.

    A bare number is refused, since nobody can tell seconds from milliseconds by looking at it; zero needs no unit.
    """
    text = str(value).strip()
    match = _DURATION.fullmatch(text)
    if match is not None:
        return float(match[1]) * _SECONDS[match[2]]
    if text in ("0", "0.0"):
        return 0.0
    hint = (
        f'"{text}s"' if re.fullmatch(r"\d+(\.\d+)?", text) else '"200ms", "5s", "5m", "3h" or "7d"'
    )
    raise ValueError(f"{value!r} is not a duration; write a number and its unit, such as {hint}")


def quote_path_segment(text: str, safe: str = "") -> str:
    """Quote a name as one segment of a path. Dots alone are encoded too: HTTP clients drop `.` and fold `..`."""
    return text.replace(".", "%2E") if text in (".", "..") else quote(text, safe=safe)


def format_duration(seconds: float) -> str:
    """Write a duration in the largest unit that divides it, as parse_duration reads it."""
    if seconds == 0:
        return "0s"
    for unit, size in reversed(_SECONDS.items()):
        count = seconds / size
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{round(seconds * 1000)}ms"
