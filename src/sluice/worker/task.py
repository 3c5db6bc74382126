"""A function and the queue whose jobs it processes.

The annotations of the function, read once, determine its arguments: the payload as bytes, text,
JSON or a model, the `Delivery`, or both. The decorated function can still be called in a test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

from sluice.client import Delivery
from sluice.client.payload_codecs import Decoder, decoder_for
from sluice.errors import ConfigError
from sluice.worker.idempotency import DeduplicationStore

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """How the jobs of a queue are processed."""

    queue: str
    group: str
    concurrency: int
    prefetch: int | None  # None: `concurrency`, and more while jobs are short
    reject: tuple[type[Exception], ...]
    timeout: float | None
    deduplicate: DeduplicationStore | None
    start: str | None


class Task(Generic[P, R]):
    """The result of `@worker.task(...)`."""

    def __init__(self, function: Callable[P, R], options: TaskOptions) -> None:
        self.function = function
        self.options = options
        self.name = getattr(function, "__name__", type(function).__name__)
        # The second check is for an object whose __call__ is a coroutine function.
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.decode: Decoder | None = None
        self.argument_kinds: tuple[str, ...] = self._read_signature()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def arguments(self, delivery: Delivery) -> tuple[Any, ...]:
        """Return the arguments for the function. Raise `UnreadablePayload` if decoding fails."""
        decode = self.decode
        if decode is None:
            return (delivery,) if self.argument_kinds else ()
        if len(self.argument_kinds) == 1:
            return (decode(delivery.payload),)
        payload = decode(delivery.payload)
        return (payload, delivery) if self.argument_kinds[0] == "payload" else (delivery, payload)

    def _read_signature(self) -> tuple[str, ...]:
        function = self.function
        try:
            hints = get_type_hints(function)
        except TypeError:
            # A partial or another callable object has no annotations to read.
            hints = {}
        except NameError as fault:
            raise ConfigError(
                f"the annotations of {self.name} cannot be read: {fault}",
                "Define the types before the function",
            ) from fault
        kinds: list[str] = []
        for one in inspect.signature(function).parameters.values():
            if one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD, one.VAR_POSITIONAL) or (
                one.default is not one.empty and kinds
            ):
                continue
            kind = hints.get(one.name, bytes)
            if kind is Delivery:
                kinds.append("delivery")
            else:
                kinds.append("payload")
                self.decode = decoder_for(kind)
        if len(kinds) != len(set(kinds)):
            raise ConfigError(
                f"{self.name} takes more than a payload and a Delivery",
                "Give the others default values",
            )
        return tuple(kinds)
