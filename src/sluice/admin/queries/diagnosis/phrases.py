"""Phrases for times, counts and commands, so that all findings use the same wording."""

from __future__ import annotations

from shlex import quote
from typing import Final

from sluice.queues.flow import format_iso_time

_UNITS: Final = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def format_duration(seconds: float) -> str:
    """Format a duration for people: 5 s, 3 min, 2 h."""
    seconds = abs(seconds)
    for size, unit in _UNITS:
        if seconds >= size:
            count = seconds / size
            return (
                f"{count:.1f} {unit}"
                if count < 10 and count != int(count)
                else f"{count:.0f} {unit}"
            )
    return f"{seconds * 1000:.0f} ms"


def format_time(at: float, now: float) -> str:
    """Format a time and how far away it is."""
    if at > now:
        return f"{format_iso_time(at)} (in {format_duration(at - now)})"
    return (
        f"{format_iso_time(at)} ({format_duration(now - at)} ago)"
        if now - at >= 0.001
        else f"{format_iso_time(at)} (just now)"
    )


def pluralize(number: int, noun: str, plural_noun: str = "") -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {plural_noun or noun + 's'}"


def count_messages(number: int, singular_verb: str, plural_verb: str) -> str:
    """Format a count of messages and a verb: "1 message waits", "2 messages wait"."""
    return f"{pluralize(number, 'message')} {singular_verb if number == 1 else plural_verb}"


def format_command(*arguments: str) -> str:
    """Format a command line that can be pasted."""
    return " ".join(["sluice", *(quote(word) for word in arguments)])


def create_queue_command(name: str) -> str:
    return format_command("queue", "create", name)


def configure_command(name: str, key: str, value: str) -> str:
    return format_command("queue", "config", name, "--set", f"{key}={value}")


def start_worker_hint(name: str, group: str) -> str:
    """Say how to start a worker for a group without consumers.

    The command to paste leaves the messages: work that it acknowledged would be lost.
    """
    preview = format_command("consume", name, "--group", group, "--leave")
    return f"Start a worker of group {group}; to look without taking: `{preview}`"


def start_first_worker_hint(name: str, group: str = "") -> str:
    """Say how to start the first worker of a group that does not exist.

    Looking at the queue must not create the group: it would keep messages forever.
    """
    worker = f"a worker of group {group}" if group else "a worker"
    look = f"to look without taking: `{peek_command(name)}`"
    return f"Start {worker}, which creates the group; {look}"


def publish_command(name: str) -> str:
    return format_command("publish", name, "hello")


def peek_command(name: str, group: str = "") -> str:
    return format_command("peek", name, *(("--group", group) if group else ()))


def seek_command(name: str, group: str, to: str) -> str:
    return format_command("seek", name, group, "--to", to)


def delete_group_command(name: str, group: str) -> str:
    return format_command("group", "delete", name, group)


def explain_command(message_id: str, name: str) -> str:
    return format_command("explain", message_id, "--queue", name)


def doctor_command(name: str, group: str = "") -> str:
    return format_command("doctor", name, *(("--group", group) if group else ()))


def consumers_command(name: str) -> str:
    return format_command("consumers", name)


def list_dead_letters_command(name: str) -> str:
    return format_command("dlq", "list", name)


def retry_dead_letters_command(name: str) -> str:
    return format_command("dlq", "retry", name, "--all")


def retry_dead_letter_command(name: str, message_id: str) -> str:
    return format_command("dlq", "retry", name, message_id)
