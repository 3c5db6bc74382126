"""The options of a subscription below `$queue/`, `$ECQ/` or `$admin/`, as the client gave them.

They are stored with the session and sent to other cells, so they stay as they came: each handler
interprets the user properties that it knows.
"""

from __future__ import annotations

from sluice.wire.packets import Subscribe


class SubscribeOptions:
    """The QoS, the subscription identifier (0: none) and the user properties of a SUBSCRIBE."""

    def __init__(self, qos: int, identifier: int, user: list[tuple[str, str]]) -> None:
        self.qos: int = qos
        self.identifier: int = identifier
        self.user: list[tuple[str, str]] = user

    def get(self, name: str) -> str | None:
        """Return the last value of a user property, or None."""
        found: str | None = None
        for one, value in self.user:
            if one == name:
                found = value
        return found

    def encode(self) -> list[object]:
        """Return the stored form: QoS, then a list of the identifier, names and values in turn."""
        texts = [str(self.identifier)]
        for name, value in self.user:
            texts.append(name)
            texts.append(value)
        return [self.qos, texts]


def decode_options(qos: int, texts: list[str]) -> SubscribeOptions:
    """Return the options that `SubscribeOptions.encode` stored."""
    return SubscribeOptions(qos, int(texts[0]), list(zip(texts[1::2], texts[2::2])))


def read_options(packet: Subscribe, qos: int) -> SubscribeOptions:
    """Return the options of a SUBSCRIBE with the granted QoS."""
    properties = packet.properties
    if properties is None:
        return SubscribeOptions(qos, 0, [])
    identifiers = properties.subscription_ids
    return SubscribeOptions(qos, identifiers[0] if identifiers else 0, properties.user)
