"""A function and the queue whose jobs it processes.

The annotations of the function, read once, determine its arguments: the payload as bytes, text,
JSON or a model, the `Delivery`, or both. The decorated function can still be called in a test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload
from typing import get_type_hints as read_type_hints

from sluice.client import Delivery
from sluice.client.payload_codecs import Decoder, decoder_for
from sluice.client.queues import SendOptions
from sluice.errors import ConfigError
from sluice.worker.idempotency import DeduplicationStore
from sluice.worker.retry_policy import RetryPolicy
from sluice.worker.sending import JobSender

P = ParamSpec("P")
R = TypeVar("R")
S = ParamSpec("S")  # the arguments of `send`: those of the function without the Delivery
T = TypeVar("T")

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
    retry: RetryPolicy | None


class TaskSender(Generic[S]):
    """Publishes jobs with options: `resize.with_options(delay="5m").send(job)`."""

    def __init__(self, task: Task[..., Any, S], sender: JobSender, options: SendOptions) -> None:
        self._task = task
        self._sender = sender
        self._options = options

    async def send(self, *args: S.args, **kwargs: S.kwargs) -> str:
        """Publish a job, wait until it is stored, and return its message id."""
        payload = self._task.payload_of(args, kwargs)
        return await self._sender.send(self._task.options.queue, payload, dict(self._options))

    def send_sync(self, *args: S.args, **kwargs: S.kwargs) -> str:
        """Do the same without an event loop, from any thread."""
        payload = self._task.payload_of(args, kwargs)
        return self._sender.send_sync(self._task.options.queue, payload, dict(self._options))


class Task(Generic[P, R, S]):
    """The result of `@worker.task(...)`: the function, and `send` to publish a job for it."""

    def __init__(self, function: Callable[P, R], options: TaskOptions, sender: JobSender) -> None:
        self.function = function
        self.options = options
        self._sender = sender
        self.name = getattr(function, "__name__", type(function).__name__)
        # The second check is for an object whose __call__ is a coroutine function.
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.decode: Decoder | None = None
        self.payload_name = ""  # of the parameter that gets the payload
        self.argument_kinds: tuple[str, ...] = self._read_signature()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    async def send(self, *args: S.args, **kwargs: S.kwargs) -> str:
        """Publish a job for this task, wait until it is stored, and return its message id.

        The argument is the payload, with the type that the function declares. The job goes over
        the connection of the running worker, or over one that the first job opens.
        """
        return await self.with_options().send(*args, **kwargs)

    def send_sync(self, *args: S.args, **kwargs: S.kwargs) -> str:
        """Do the same without an event loop, from any thread."""
        return self.with_options().send_sync(*args, **kwargs)

    def with_options(self, **options: Unpack[SendOptions]) -> TaskSender[S]:
        """Return a sender with options: `id`, `key`, `delay`, `priority`, `headers` and others."""
        return TaskSender(self, self._sender, options)

    def payload_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Return the payload of a job from the arguments of `send`."""
        if not self.argument_kinds and not args and not kwargs:
            return b""
        values = [*args, *kwargs.values()]
        if len(values) != 1 or (kwargs and self.payload_name not in kwargs):
            name = self.payload_name or "payload"
            raise TypeError(f"{self.name}.send takes one argument, {name}")
        return values[0]

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
            hints = read_type_hints(function)
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
                self.payload_name = one.name
                self.decode = decoder_for(kind)
        if len(kinds) != len(set(kinds)):
            raise ConfigError(
                f"{self.name} takes more than a payload and a Delivery",
                "Give the others default values",
            )
        return tuple(kinds)


AnyTask = Task[..., Any, ...]


class TaskDecorator(Protocol):
    """What `@worker.task(...)` returns: the types of a task follow from its function."""

    @overload
    def __call__(self, function: Callable[[Delivery], R], /) -> Task[[Delivery], R, [bytes]]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]  # of two deliveries
        self, function: Callable[[T, Delivery], R], /
    ) -> Task[[T, Delivery], R, [T]]: ...

    @overload
    def __call__(self, function: Callable[[Delivery, T], R], /) -> Task[[Delivery, T], R, [T]]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R, P]: ...
