"""`sluice dlq ...`: dead letters, by the name of the queue whose messages they were.

Commands that put back or delete several are previewed and confirmed first, unless `--yes`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import uuid4

import typer

from sluice.cli.commands.messages.edited_payload import read_edited_payload
from sluice.cli.commands.messages.peek import Limit, show_message
from sluice.cli.support import (
    BAD,
    FAINT,
    Column,
    CommandContext,
    CommandError,
    Contains,
    DryRun,
    MqttOption,
    Output,
    Queue,
    ToAll,
    Yes,
    command,
    complete_group,
    filter_parameters,
    format_age,
    format_count,
    format_payload,
    format_plural,
    make_client,
    parse_seconds,
    queue_path,
    similar_names,
    styled,
    table,
    usage_error,
)
from sluice.client import Client, ReplayResult, replay_dead_letters

app = typer.Typer(no_args_is_help=True, help="Dead letters: show, put back, delete.")

MQTT_VERSIONS: Final = {"5": 5, "5.0": 5, "3.1.1": 4, "4": 4}
SESSION_EXPIRY: Final = 0xFFFF_FFFF  # the session that collects dead letters stays
DEAD_REASONS: Final = ("max_retries", "timeout", "rejected", "expired", "overflow")
BATCH_SIZE: Final = 500  # put back by one call
PREVIEW_LIMIT: Final = 1000  # of a preview
SHOWN_ROWS: Final = 5
ROWS_KEY: Final = "letters"  # words: allowed (JSON key)

Id = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the dead letter, or of the message that died.")
]
OneId = Annotated[
    str,
    typer.Argument(
        metavar="[ID]", help="One dead letter; leave it out and say which by --all or a filter."
    ),
]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]


@dataclass(frozen=True)
class DeadLetterFilter:
    """The options that select dead letters."""

    reason: Annotated[
        str,
        typer.Option(
            metavar="REASON", help="Died of: max_retries, timeout, rejected, expired, overflow."
        ),
    ] = ""
    group: Annotated[
        str,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="Died in this group.",
            autocompletion=complete_group,
        ),
    ] = ""
    since: Annotated[
        str, typer.Option(metavar="WHEN", help="Died at or after: a time, or 2h for two hours ago.")
    ] = ""
    until: Annotated[str, typer.Option(metavar="WHEN", help="Died before.")] = ""
    contains: Contains = ""

    def wanted(self, now: float) -> dict[str, object]:
        """Return the given options as parameters of a request."""
        if self.reason and self.reason not in DEAD_REASONS:
            similar = similar_names(self.reason, DEAD_REASONS)
            raise usage_error(
                f"--reason {self.reason!r} is not a reason",
                f"Did you mean {similar[0]}?" if similar else f"Use {', '.join(DEAD_REASONS)}",
            )
        return filter_parameters(self, now)


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="dlq", rich_help_panel=panel)


@command(app, "list")
def list_dead_letters(
    cli: CommandContext,
    queue: Queue,
    chosen: DeadLetterFilter,
    after: Annotated[
        str, typer.Option(metavar="ID", help="Only those after this dead letter.")
    ] = "",
    limit: Limit = 50,
) -> None:
    """List the dead letters of a queue: why and when they died."""
    wanted = chosen.wanted(cli.now)
    found = cli.api.get(queue_path(queue, "dlq"), **wanted, after=after, limit=limit)
    if cli.print_if_json(found):
        return
    if not found:
        _check_group(cli, queue, chosen.group)
        cli.out.show(f"No dead letters of {queue}{' match' if wanted else ''}.")
        return
    _show_dead_letters(cli.out, found, cli.now)
    if len(found) == limit:
        cli.out.note(f"The first {limit}; go on with --after {found[-1]['message_id']}")


@command(app, "show")
def show(cli: CommandContext, queue: Queue, message_id: Id) -> None:
    """Show one dead letter: payload, properties and why it died."""
    found = cli.api.get(queue_path(queue, "dlq", message_id))
    if cli.print_if_json(found):
        return
    show_message(cli.out, found, cli.now)


@command(app, "retry")
def retry(
    cli: CommandContext,
    queue: Queue,
    chosen: DeadLetterFilter,
    message_id: OneId = "",
    every: All = False,
    to_all: ToAll = False,
    payload_file: Annotated[
        Path | None,
        typer.Option(
            "--payload-file",
            metavar="FILE",
            help="With ID: put it back with the content of this file as its payload.",
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Put dead letters back into their queue: one, or all that match. They begin again with attempt
    1.
    """
    wanted = chosen.wanted(cli.now)
    _check_selection(bool(message_id), every, bool(wanted), "retry")
    edited = read_edited_payload(payload_file, bool(message_id))
    if message_id:
        found = _get_dead_letter(cli, queue, message_id)
        if dry_run:
            _show_preview(cli, "would_retry", [found], False)
            return
        answer = cli.api.post(
            queue_path(queue, "dlq", message_id, "retry"), {"to_all": to_all, **edited}
        )
        if not answer["retried"]:
            raise CommandError(
                f"dead letter {message_id} was not put back:"
                " a consumer works on it, or its queue is gone",
                f"See who consumes the dead letters: sluice consumers dlq/{original_queue(queue)}",
            )
        _report(cli, queue, answer)
        return
    dead_letters, more = _preview(cli, queue, wanted)
    if not dead_letters:
        _check_group(cli, queue, chosen.group)
    if dry_run or not dead_letters:
        _show_preview(cli, "would_retry", dead_letters, more)
        return
    if not yes:
        _show_preview(cli, "would_retry", dead_letters, more, before_confirm=True)
    cli.out.confirm(
        f"Put {_count_text(dead_letters, more)} back into {original_queue(queue)}?", yes
    )
    _report(
        cli, queue, _retry_many(cli, queue, wanted, to_all, None if more else len(dead_letters))
    )


@command(app, "purge")
def purge(
    cli: CommandContext,
    queue: Queue,
    chosen: DeadLetterFilter,
    message_id: OneId = "",
    every: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete dead letters for good: one, or all that match."""
    wanted = chosen.wanted(cli.now)
    _check_selection(bool(message_id), every, bool(wanted), "purge")
    if message_id:
        dead_letters, more = [_get_dead_letter(cli, queue, message_id)], False
    else:
        dead_letters, more = _preview(cli, queue, wanted)
        if not dead_letters:
            _check_group(cli, queue, chosen.group)
    if dry_run or not dead_letters:
        _show_preview(cli, "would_purge", dead_letters, more)
        return
    if not yes:
        _show_preview(cli, "would_purge", dead_letters, more, before_confirm=True)
    cli.out.confirm(f"Delete {_count_text(dead_letters, more)} of {queue} for good?", yes)
    if message_id:
        cli.api.delete(queue_path(queue, "dlq", message_id))
        answer = {"purged": 1}
    else:
        answer = cli.api.post(queue_path(queue, "dlq", "purge"), wanted)
    if cli.print_if_json(answer):
        return
    cli.out.show(f"Purged {format_plural(answer['purged'], 'dead letter')} of {queue}.")


@command(app, "replay-topic")
def replay_topic(
    cli: CommandContext,
    topic: Annotated[
        str,
        typer.Argument(metavar="TOPIC", help="Dead-letter topic, or $queue/NAME if it is a queue."),
    ],
    client_id: Annotated[
        str,
        typer.Option(metavar="ID", help="Client id of the persistent session that collected them."),
    ] = "",
    version: Annotated[
        str, typer.Option("--mqtt-version", metavar="VERSION", help="5 or 3.1.1, as it connected.")
    ] = "5",
    group: Annotated[
        str, typer.Option("--group", "-g", metavar="GROUP", help="Group, if it is a queue.")
    ] = "replay",
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
    wait: Annotated[
        str, typer.Option(metavar="DURATION", help="End after this long without a message.")
    ] = "2s",
    mqtt: MqttOption = None,
) -> None:
    """Put dead letters that clients published to a topic back on their original topic.

    Works with any MQTT broker. A topic stores nothing: give the client id of a persistent session
    that subscribed to it, or use a queue as dead-letter topic.
    """
    if version not in MQTT_VERSIONS:
        raise usage_error(f"--mqtt-version is {version!r}", "Use 5 or 3.1.1")
    if not client_id and not topic.startswith("$queue/"):
        raise usage_error(
            f"{topic} is a topic, which stores nothing",
            "Give the --client-id of a session that subscribed to it, or name a queue: $queue/NAME",
        )
    client = make_client(
        cli.broker,
        mqtt,
        client_id=client_id or f"sluice-cli-{uuid4().hex[:8]}",
        version=MQTT_VERSIONS[version],
        clean_start=not client_id,
        session_expiry=SESSION_EXPIRY if client_id and version == "5" else 0,
        manual_ack=True,
        reconnect=False,
    )
    result = asyncio.run(_replay(client, topic, group, parse_seconds("--wait", wait), limit))
    if cli.print_if_json({"replayed": result.replayed, "skipped": result.skipped}):
        return
    skipped = f", skipped {format_count(result.skipped)} without originalTopic"
    cli.out.show(
        f"Replayed {format_plural(result.replayed, 'dead letter')} of {topic}"
        f"{skipped if result.skipped else ''}."
    )


async def _replay(
    client: Client, topic: str, group: str, idle_seconds: float, limit: int | None
) -> ReplayResult:
    async with client:
        return await replay_dead_letters(
            client, topic, group=group, idle_seconds=idle_seconds, limit=limit
        )


def _get_dead_letter(cli: CommandContext, queue: str, message_id: str) -> dict[str, Any]:
    """Return one dead letter, after a check of its id: the next request uses the same path."""
    found: dict[str, Any] = cli.api.get(queue_path(queue, "dlq", message_id))
    names = [found.get("message_id"), found.get("headers", {}).get("original-message-id")]
    if message_id not in names:
        raise CommandError(
            f"the server was asked for dead letter {message_id} of {queue},"
            " and answered with something else",
            "Nothing was changed. See whether a proxy before the server changes paths",
        )
    return found


def _check_group(cli: CommandContext, queue: str, group: str) -> None:
    """Refuse a group that the queue does not have; called if none of its dead letters was found.

    Dead letters of a deleted group can still be selected.
    """
    if group:
        cli.api.get(queue_path(original_queue(queue), "groups", group))


def original_queue(name: str) -> str:
    """Return the queue whose dead letters a command is about; dlq/NAME means NAME."""
    return name.removeprefix("$queue/").removeprefix("dlq/")


def _check_selection(one: bool, every: bool, filtered: bool, verb: str) -> None:
    if one + every + filtered == 0:
        raise usage_error(
            "no dead letters are selected",
            "Name one by its id, or choose with --all, --reason, --group or --since:"
            f" sluice dlq {verb} --help",
        )
    if one + every + filtered > 1:
        raise usage_error("an id, --all and a filter exclude each other", "Give one of the three")


def _preview(
    cli: CommandContext, queue: str, wanted: Mapping[str, object]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the dead letters that match, up to a bound, and whether there are more."""
    found: list[dict[str, Any]] = []
    page = 100
    while len(found) < PREVIEW_LIMIT:
        after = found[-1]["message_id"] if found else ""
        dead_letters = cli.api.get(
            queue_path(queue, "dlq"), **wanted, after=after, limit=page, payload_bytes=200
        )
        found += dead_letters
        if len(dead_letters) < page:
            return found, False
    return found, True


def _show_preview(
    cli: CommandContext,
    name: str,
    dead_letters: list[dict[str, Any]],
    more: bool,
    before_confirm: bool = False,
) -> None:
    if cli.as_json:
        if not before_confirm:
            cli.out.print_json({name: len(dead_letters), "more": more, ROWS_KEY: dead_letters})
        return
    if not dead_letters:
        cli.out.show("No dead letters match. Nothing to do.")
        return
    _show_dead_letters(cli.out, dead_letters[:SHOWN_ROWS], cli.now)
    reasons = Counter(row["headers"].get("dead-reason", "?") for row in dead_letters)
    reasons_text = ", ".join(
        f"{reason} {format_count(number)}" for reason, number in reasons.most_common()
    )
    cli.out.show(styled(f"{_count_text(dead_letters, more)} in all: {reasons_text}", style="bold"))


def _count_text(dead_letters: list[dict[str, Any]], more: bool) -> str:
    return ("more than " if more else "") + format_plural(len(dead_letters), "dead letter")


def _retry_many(
    cli: CommandContext, queue: str, wanted: Mapping[str, object], to_all: bool, total: int | None
) -> dict[str, int]:
    """Put back in batches, so that each call is short and the progress bar moves.

    Skipped dead letters would be selected again: a batch that puts none back is the last one.
    """
    done = {"retried": 0, "skipped": 0, "left": 0}
    with cli.out.progress(total) as progress:
        task = progress.add_task("putting back", total=total, rate="")
        while True:
            body = {**wanted, "limit": BATCH_SIZE, "to_all": to_all}
            answer = cli.api.post(queue_path(queue, "dlq", "retry"), body)
            done["retried"] += answer["retried"]
            done["skipped"], done["left"] = answer["skipped"], answer["left"]
            progress.update(task, completed=done["retried"])
            if not answer["left"] or not answer["retried"]:
                return done


def _report(cli: CommandContext, queue: str, answer: Mapping[str, int]) -> None:
    if cli.print_if_json(answer):
        return
    whose = ("it", "its") if answer["skipped"] == 1 else ("them", "their")
    skipped = (
        f", {format_count(answer['skipped'])} skipped (a consumer works on {whose[0]},"
        f" or {whose[1]} queue is gone)"
    )
    left = f", {format_count(answer['left'])} left"
    cli.out.show(
        f"Put {format_plural(answer['retried'], 'dead letter')} back into {original_queue(queue)}"
        f"{skipped if answer['skipped'] else ''}{left if answer['left'] else ''}."
    )


def _show_dead_letters(out: Output, dead_letters: list[dict[str, Any]], now: float) -> None:
    columns = [
        Column("dead letter"),
        Column("message"),
        Column("died", number=True),
        Column("reason", style=BAD),
        Column("group"),
    ]
    columns += [
        Column("tries", number=True),
        Column("description"),
        Column("payload", cut=True, style=FAINT),
    ]
    rows = []
    for row in dead_letters:
        headers = row["headers"]
        rows.append(
            [
                row["message_id"],
                headers.get("original-message-id", ""),
                format_age(headers.get("dead-at") or row["enqueued_at"], now).removesuffix(" ago"),
                headers.get("dead-reason", ""),
                headers.get("original-group", ""),
                headers.get("attempts", ""),
                headers.get("dead-description", ""),
                format_payload(row["payload"], row["size"], out.payload_width),
            ]
        )
    out.show(table(columns, rows, out.width))
