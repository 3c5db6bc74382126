"""How the service speaks of times and tells which command helps. One place, so that all answers sound alike."""

from __future__ import annotations

from shlex import quote
from typing import Final

from sluice.queues.flow.dead_letters import iso_time

_UNITS: Final = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def span(seconds: float) -> str:
    """A duration as people say it: 5 s, 3 min, 2 h."""
    seconds = abs(seconds)
    for size, unit in _UNITS:
        if seconds >= size:
            count = seconds / size
            return f"{count:.1f} {unit}" if count < 10 and count != int(count) else f"{count:.0f} {unit}"
    return f"{seconds * 1000:.0f} ms"


def moment(at: float, now: float) -> str:
    """A time, and how far away it is."""
    if at > now:
        return f"{iso_time(at)} (in {span(at - now)})"
    return f"{iso_time(at)} ({span(now - at)} ago)" if now - at >= 0.001 else f"{iso_time(at)} (just now)"


def count_of(number: int, noun: str, nouns: str = "") -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {nouns or noun + 's'}"


def messages(number: int, one: str, many: str) -> str:
    """Messages and what they do: "1 message waits", "2 messages wait"."""
    return f"{count_of(number, 'message')} {one if number == 1 else many}"


def command(*words: str) -> str:
    """A command line that can be pasted."""
    return " ".join(["sluice", *(quote(word) for word in words)])


def create_queue(name: str) -> str:
    return command("queue", "create", name)


def configure(name: str, key: str, value: str) -> str:
    return command("queue", "config", name, "--set", f"{key}={value}")


def start_worker(name: str, group: str) -> str:
    """What helps where nobody consumes. The command to paste takes nothing: work that it acknowledged would be lost."""
    look = command("consume", name, "--group", group, "--leave")
    return f"Start a worker of group {group}; to look without taking: `{look}`"


def start_first_worker(name: str, group: str = "") -> str:
    """The same where the group is not there yet: a look must not make one that then waits for ever."""
    worker = f"a worker of group {group}" if group else "a worker"
    return f"Start {worker}, which makes the group; to look without taking: `{peek(name)}`"


def publish(name: str) -> str:
    return command("publish", name, "hello")


def peek(name: str, group: str = "") -> str:
    return command("peek", name, *(("--group", group) if group else ()))


def seek(name: str, group: str, to: str) -> str:
    return command("seek", name, group, "--to", to)


def delete_group(name: str, group: str) -> str:
    return command("group", "delete", name, group)


def explain(message_id: str, name: str) -> str:
    return command("explain", message_id, "--queue", name)


def doctor(name: str, group: str = "") -> str:
    return command("doctor", name, *(("--group", group) if group else ()))


def consumers(name: str) -> str:
    return command("consumers", name)


def list_letters(name: str) -> str:
    return command("dlq", "list", name)


def retry_letters(name: str) -> str:
    return command("dlq", "retry", name, "--all")


def retry_letter(name: str, message_id: str) -> str:
    return command("dlq", "retry", name, message_id)
