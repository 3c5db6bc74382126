"""Checks payloads against the JSON Schema of their queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sluice.errors import InvalidPayload
from sluice.message import Message
from sluice.queues.engine import Engine
from sluice.queues.flow import UNACCEPTABLE
from sluice.queues.model import Queue

MAX_VALIDATORS: Final = 1000

Validator = Callable[[bytes], str]


class SchemaChecks:
    """`make_validator` returns a check for a JSON Schema.

    The check returns the error of a payload, or an empty string.
    """

    def __init__(self, engine: Engine, make_validator: Callable[[str], Validator]) -> None:
        self._engine: Engine = engine
        self._make_validator = make_validator
        self._validators: dict[str, Validator] = {}

    def get_validator(self, queue: Queue) -> Validator:
        """Return the schema check of this queue's payloads."""
        schema = queue.rules.schema
        validator = self._validators.get(schema)
        if validator is None:
            if len(self._validators) >= MAX_VALIDATORS:
                self._validators.clear()
            validator = self._validators[schema] = self._make_validator(schema)
        return validator

    def check_payload(self, queue: Queue, message: Message) -> bool:
        """Check a payload; return False if it does not fit the schema of its queue.

        Then the message went to the invalid-message queue. It is refused if there is
        none, or if that queue cannot be created. A payload that is too large is not checked,
        because that could take long: `Publishing.publish` refuses it.
        """
        if len(message.payload) > queue.rules.max_message_size:
            return True
        fault = self.get_validator(queue)(message.payload)
        if not fault:
            return True
        if not queue.rules.invalid_queue_name:
            raise InvalidPayload(queue.name, fault)
        if not self._engine.dead_letters.write_refused(queue, message, UNACCEPTABLE, fault):
            raise InvalidPayload(
                queue.name,
                fault,
                f"Fix the payload, or create the queue {queue.rules.invalid_queue_name!r} for such "
                "messages: the broker could not, and its log says why",
            )
        return False
