"""Parses and formats addresses and durations.

Configuration files, flags and queue settings use the same notation. An invalid value raises
ValueError with a sentence for the user; the caller adds the name of the setting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import quote

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Parts with decreasing units, such as "1h30m".
_DURATION: Final = re.compile(
    "".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in ("d", "h", "m(?!s)", "s", "ms"))
)


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on. Port 0 selects a free port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach it; of names, only localhost."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_address(text: str) -> Address:
    """Parse `host:port`. An IPv6 host needs brackets, because it contains colons.

    The host has no default: "all interfaces" and "this machine only" differ in who can connect.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host:
        raise ValueError(
            f"{text!r} is not HOST:PORT; write 127.0.0.1:1883 for this machine only, "
            "0.0.0.0:1883 for all interfaces"
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
    """Parse "200ms", "5s", "5m", "3h", "7d" or "1m30s" as seconds.

    A bare number is refused, because it could mean seconds or milliseconds; zero needs no unit.
    """
    text = str(value).strip()
    match = _DURATION.fullmatch(text)
    if match is not None and text:
        sizes = reversed(_SECONDS.values())
        return sum(
            float(count) * size
            for count, size in zip(match.groups(), sizes, strict=True)
            if count is not None
        )
    if text in ("0", "0.0"):
        return 0.0
    hint = (
        f'"{text}s"' if re.fullmatch(r"\d+(\.\d+)?", text) else '"200ms", "5s", "5m", "3h" or "7d"'
    )
    raise ValueError(f"{value!r} is not a duration; write a number and its unit, such as {hint}")


_RATE = re.compile(r"(\d+(?:\.\d+)?)/(s|m|h)(?: burst (\d+))?")
_RATE_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_rate(text: str) -> tuple[float, float]:
    """Parse "100/s", "30/m" or "100/s burst 20" as a rate per second and a burst, 0.0 for none."""
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) / _RATE_SECONDS[match[2]] if match else 0.0
    if match is None or not 1e-6 <= rate <= 1e9:
        raise ValueError(
            f'{text!r} is not a rate; write a number and its unit, such as "100/s", "30/m" or '
            '"100/s burst 20"'
        )
    burst = float(match[3]) if match[3] else 0.0
    if match[3] and not 1.0 <= burst <= 1e9:
        raise ValueError(f"{text!r} has a burst that is not from 1 to 1000000000")
    return rate, burst


def quote_path_segment(text: str, safe: str = "") -> str:
    """Quote a name as one path segment, dots included: HTTP clients drop `.` and resolve `..`."""
    return text.replace(".", "%2E") if text in (".", "..") else quote(text, safe=safe)


def format_duration(seconds: float) -> str:
    """Format a duration in the largest unit that divides it, as parse_duration reads it."""
    if seconds == 0:
        return "0s"
    for unit, size in reversed(_SECONDS.items()):
        count = seconds / size
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{round(seconds * 1000)}ms"
