"""Interfaces through which the engine calls its user. The other one is `model.group.Consumer`.

The broker passes objects of these classes; the engine knows nothing else about the broker. They are
base classes and not protocols because mypyc calls a native method directly, but looks up a
protocol's method by name.
"""

from __future__ import annotations

from librt.vecs import vec
from mypy_extensions import i64, mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Publisher:
    """Waits for the commit of the messages that it publishes.

    With each one it gives a `tag`, a number of its own choice, and gets it back.
    """

    def on_written(self, tag: i64) -> None:
        """Called when a deferred command is written: `tag` waits for the open frame from now on."""

    def on_committed(self, tag: i64) -> None:
        """Called when the message published under `tag` can no longer be lost."""

    def on_committed_many(self, tags: vec[i64], start: i64, end: i64) -> None:
        """Called for `tags[start:end]`, in order: one call acknowledges many messages."""
        while start < end:
            self.on_committed(tags[start])
            start += 1


@mypyc_attr(allow_interpreted_subclasses=True)
class Committer:
    """Commits what a turn of the event loop has decided. This base class has nothing to commit."""

    def end_turn(self) -> None:
        """Dispatch, start reads, and submit the open frame to the store."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Codec:
    """Compresses payloads. Injected, so that the engine needs no compression library."""

    def compress(self, data: bytes) -> bytes:
        return data

    def decompress(self, data: bytes) -> bytes:
        """Return the data that `compress` was given. Raise ValueError for other input."""
        return data


class ConnectionState:
    """The connection and the session of a consumer, for display."""

    def __init__(
        self,
        is_slow: bool,
        last_read_at: float,
        unacked: int,
        window: int,
        disconnected_at: float,
        expires_at: float,
    ) -> None:
        self.is_slow: bool = is_slow  # it does not keep up with what it is sent
        self.last_read_at: float = last_read_at  # 0.0: not connected
        self.unacked: int = unacked  # what was sent to the client, and is not acknowledged
        self.window: int = window  # how much of that it allows
        self.disconnected_at: float = disconnected_at  # 0.0: connected
        self.expires_at: float = expires_at  # of the session; infinite: never
