"""`sluice queue ...`: create, show, change, empty and remove queues."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.text import Text

from sluice.cli.commands.groups import group_table
from sluice.cli.support import (
    BAD,
    FAINT,
    WARN,
    Column,
    CommandContext,
    Queue,
    Yes,
    command,
    facts_table,
    format_age,
    format_count,
    format_plural,
    format_rate,
    format_size,
    queue_path,
    styled,
    table,
    usage_error,
)
from sluice.units import parse_duration

app = typer.Typer(no_args_is_help=True, help="Create, show, change, empty and remove queues.")

Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Such as limits.max_queue_depth=5; can be repeated."
    ),
]


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="queue", rich_help_panel=panel)


@command(app, "create")
def create(
    cli: CommandContext,
    name: Annotated[str, typer.Argument(help="Name of the new queue, such as tasks/image.")],
    config: Annotated[
        str, typer.Option(metavar="JSON|@FILE", help="Its configuration; @- reads it from stdin.")
    ] = "",
    changes: Changes = None,
) -> None:
    """Create a queue. Options that are not given have their defaults."""
    queue_path(name)  # refuse an invalid name early
    wanted = {**_read_config(config), "name": name.removeprefix("$queue/")}
    made = cli.api.post("/queues", _merge(wanted, _read_changes(changes)))
    if cli.print_if_json(made):
        return
    stats = made["stats"]
    cli.out.show(
        f"Created {stats['name']}: {format_plural(stats['partitions'], 'partition')}, "
        f"ordering {stats['ordering']}, at most {format_plural(stats['max_depth'], 'message')}, "
        f"dead letters to {stats['dlq'] or 'nowhere'}."
    )
    _note_capped_backoff(cli, made["config"])


@command(app, "list")
def list_queues(
    cli: CommandContext,
    prefix: Annotated[str, typer.Argument(help="Only names with this prefix.")] = "",
    dead_letters: Annotated[
        bool, typer.Option("--all", "-a", help="Dead-letter queues in the list as well.")
    ] = False,
) -> None:
    """List all queues, with depth, rates and consumers."""
    found = cli.api.queues(prefix.removeprefix("$queue/"))
    if cli.print_if_json(found):
        return
    shown = [row for row in found if dead_letters or prefix or not row["is_dead_letters"]]
    if not shown:
        cli.out.show("No queues. The first publish makes one, or: sluice queue create NAME")
        return
    cli.out.show(queue_table(shown))
    hidden = len(found) - len(shown)
    if hidden:
        cli.out.note(f"{format_plural(hidden, 'dead-letter queue')} not shown: --all")


@command(app, "show")
def show(cli: CommandContext, queue: Queue) -> None:
    """Show one queue: figures, groups, partitions."""
    detail = cli.api.get(queue_path(queue))
    if cli.print_if_json(detail):
        return
    stats = detail["stats"]
    dead = sum(stats["dead"].values())
    reasons = ", ".join(
        f"{reason} {format_count(number)}" for reason, number in sorted(stats["dead"].items())
    )
    depth = (
        f"{format_count(stats['total_messages'])} of {format_count(stats['max_depth'])}, "
        f"{format_size(stats['bytes'])}"
    )
    full = stats["total_messages"] >= stats["max_depth"]
    cli.out.show(
        styled(stats["name"], style="bold"),
        facts_table(
            [
                ("kind", f"{stats['type']}, ordering {stats['ordering']}"),
                ("depth", styled(f"{depth}, full" if full else depth, style=BAD if full else "")),
                (
                    "out",
                    f"{format_count(stats['inflight_messages'])} delivered, "
                    f"{format_count(stats['retrying'])} retrying",
                ),
                (
                    "rates",
                    f"{format_rate(stats['enqueue_rate'])}/s in, "
                    f"{format_rate(stats['dequeue_rate'])}/s delivered, "
                    f"{format_rate(stats['ack_rate'])}/s acked, "
                    f"{format_rate(stats['nack_rate'])}/s nacked",
                ),
                (
                    "latency",
                    f"{_format_latency(stats['avg_delivery_latency'])} to the first delivery, "
                    f"{_format_latency(stats['avg_process_latency'])} from delivery to ack",
                ),
                (
                    "so far",
                    f"{format_count(stats['enqueued'])} enqueued, "
                    f"{format_count(stats['acked'])} acked, "
                    f"{format_count(stats['retry_count'])} retried, "
                    f"{format_count(stats['duplicates'])} duplicates, "
                    f"{format_count(stats['refused'])} refused",
                ),
                ("died", f"{format_count(dead)} ({reasons})" if dead else "0"),
                ("dead letters", _format_dead_letters(stats)),
                (
                    "consumers",
                    f"{format_count(stats['active_consumers'])}, {_count_served(detail)} of "
                    f"{format_plural(stats['partitions'], 'partition')} assigned",
                ),
                ("created", format_age(stats["created_at"], cli.now)),
            ]
        ),
    )
    if detail["groups"]:
        cli.out.show("", group_table(detail["groups"], cli.now))
    stored = [row for row in detail["partitions"] if row["messages"]]
    if stored:
        columns = [Column("partition", number=True), Column("messages", number=True)]
        columns += [Column("first kept", number=True), Column("next", number=True)]
        rows = [
            [str(row["number"]), *(format_count(row[key]) for key in ("messages", "first", "next"))]
            for row in stored
        ]
        cli.out.show("", table(columns, rows))
        if len(stored) < len(detail["partitions"]):
            empty = len(detail["partitions"]) - len(stored)
            cli.out.show(styled(f"{format_plural(empty, 'partition')} more, empty", style=FAINT))


@command(app, "config")
def configure(cli: CommandContext, queue: Queue, changes: Changes = None) -> None:
    """Show a queue's configuration, or change it with --set. Changes apply at once."""
    path = queue_path(queue, "config")
    wanted = _read_changes(changes)
    config = cli.api.put(path, wanted) if wanted else cli.api.get(path)
    if cli.print_if_json(config):
        return
    changed = dict(_flatten(wanted))
    defaults = _default_config(config["name"])
    rows: list[list[str | Text]] = []
    for key, value in _flatten(config):
        if wanted and not any(key == one or key.startswith(f"{one}.") for one in changed):
            continue  # after a change, show only the changed keys
        default = key == "name" or defaults.get(key, value) == value
        style = FAINT if default and not wanted else ""
        rows.append(
            [
                styled(key, style=style),
                styled(_format_value(value), style=style),
                "" if default else _format_value(defaults[key]),
            ]
        )
    cli.out.show(table([Column("key"), Column("value"), Column("default", style=FAINT)], rows))
    if wanted:
        _note_capped_backoff(cli, config)


@command(app, "purge")
def purge(
    cli: CommandContext,
    queue: Queue,
    older_than: Annotated[
        str, typer.Option(metavar="DURATION", help="Only messages older than that, such as 2h.")
    ] = "",
    keep_newest: Annotated[
        int, typer.Option(min=0, metavar="N", help="Keep the N newest messages of the queue.")
    ] = 0,
    yes: Yes = False,
) -> None:
    """Delete every message that no consumer works on. Dead letters stay."""
    stats = cli.api.get(queue_path(queue, "stats"))
    limits = {"older_than": older_than, "keep_newest": str(keep_newest or "")}
    query = urlencode({key: value for key, value in limits.items() if value})
    cli.out.confirm(
        f"Throw away up to {format_plural(stats['total_messages'], 'message')} of {stats['name']}?",
        yes,
    )
    answer = cli.api.post(queue_path(queue, "purge") + (f"?{query}" if query else ""))
    if cli.print_if_json(answer):
        return
    cli.out.show(f"Purged {format_plural(answer['purged'], 'message')} of {stats['name']}.")


@command(app, "pause")
def pause(
    cli: CommandContext,
    queue: Queue,
    reason: Annotated[str, typer.Option(help="Shown wherever the pause is.")] = "",
) -> None:
    """Deliver nothing more to any group. Publishes and settlements go on."""
    stats = cli.api.post(queue_path(queue, "pause"), {"reason": reason})
    if cli.print_if_json(stats):
        return
    cli.out.show(f"Paused {stats['name']}. To go on: sluice queue resume {stats['name']}")


@command(app, "resume")
def resume(cli: CommandContext, queue: Queue) -> None:
    """End the pause of a queue. A group that was paused by itself stays paused."""
    stats = cli.api.post(queue_path(queue, "resume"))
    if cli.print_if_json(stats):
        return
    cli.out.show(f"Resumed {stats['name']}.")


@command(app, "delete")
def delete(cli: CommandContext, queue: Queue, yes: Yes = False) -> None:
    """Remove a queue with everything in it. Its dead letters stay."""
    stats = cli.api.get(queue_path(queue, "stats"))
    cli.out.confirm(
        f"Delete {stats['name']} and {format_plural(stats['total_messages'], 'message')} in it?",
        yes,
    )
    cli.api.delete(queue_path(queue))
    if cli.print_if_json({"deleted": stats["name"]}):
        return
    cli.out.show(f"Deleted {stats['name']}.")


def _note_capped_backoff(cli: CommandContext, config: Mapping[str, Any]) -> None:
    """Tell that a first backoff beyond the largest one has no effect."""
    policy = config.get("retry_policy") or {}
    initial, largest = policy.get("initial_backoff"), policy.get("max_backoff")
    if initial and largest and parse_duration(initial) > parse_duration(largest):
        cli.out.note(
            f"Note: retry_policy.max_backoff caps every backoff at {largest},"
            f" so initial_backoff={initial} has no effect"
        )


def queue_table(rows: list[dict[str, Any]]) -> Any:
    columns = [Column("queue"), *(Column(head, number=True) for head in ("depth", "out", "retry"))]
    columns += [
        Column("dead", number=True),
        Column("in/s", number=True),
        Column("acked/s", number=True),
    ]
    columns.append(Column("consumers", number=True))
    return table(columns, [_queue_row(row) for row in rows])


def _queue_row(row: Mapping[str, Any]) -> list[str | Text]:
    full = row["total_messages"] >= row["max_depth"]
    has_no_consumers = (
        row["total_messages"] > 0 and not row["active_consumers"] and not row["is_dead_letters"]
    )
    return [
        row["name"],
        styled(format_count(row["total_messages"]), style=BAD if full else ""),
        format_count(row["inflight_messages"]),
        styled(format_count(row["retrying"]), style=WARN if row["retrying"] else ""),
        styled(format_count(row["dlq_messages"]), style=BAD if row["dlq_messages"] else ""),
        format_rate(row["enqueue_rate"]),
        format_rate(row["ack_rate"]),
        styled(format_count(row["active_consumers"]), style=WARN if has_no_consumers else ""),
    ]


def _count_served(detail: Mapping[str, Any]) -> int:
    """Return how many partitions some consumer serves."""
    return len(
        {
            number
            for group in detail["groups"]
            for consumer in group["consumers"]
            for number in consumer["partitions"]
        }
    )


def _format_latency(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


def _format_dead_letters(stats: Mapping[str, Any]) -> str | Text:
    if not stats["dlq"]:
        return "no dead-letter queue"
    text = f"{format_count(stats['dlq_messages'])} in {stats['dlq']}"
    return styled(text, style=BAD) if stats["dlq_messages"] else text


def _read_config(given: str) -> dict[str, object]:
    if not given:
        return {}
    if given == "@-":
        text = sys.stdin.read()
    elif given.startswith("@"):
        text = Path(given[1:]).read_text("utf-8", errors="replace")
    else:
        text = given
    try:
        config = json.loads(text)
    except ValueError as fault:
        raise usage_error(
            f"--config is not JSON: {fault}", "Write it as '{\"partitions\": 4}', or @file"
        ) from None
    if not isinstance(config, dict):
        raise usage_error(
            "--config is not a JSON object", "Write it as '{\"partitions\": 4}', or @file"
        )
    return config


def _read_changes(given: list[str] | None) -> dict[str, object]:
    """Parse `limits.max_queue_depth=5` to {"limits": {"max_queue_depth": 5}}. Other than JSON is
    text: 5s, strict.
    """
    tree: dict[str, object] = {}
    for change in given or []:
        key, equals, text = change.partition("=")
        if not equals or not all(key.split(".")):
            raise usage_error(
                f"--set {change!r} is not KEY=VALUE", "Write it as limits.max_queue_depth=5"
            )
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = _merge(tree, value)
    return tree


def _merge(base: Mapping[str, object], change: Mapping[str, object]) -> dict[str, object]:
    merged = dict(base)
    for key, value in change.items():
        before = merged.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        merged[key] = _merge(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _flatten(tree: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield keys with dots, those at the top first; a schema stays whole."""
    below = []
    for key, value in tree.items():
        if isinstance(value, dict) and value and key != "schema":
            below.append((key, value))
        else:
            yield above + key, value
    for key, value in below:
        yield from _flatten(value, f"{above}{key}.")


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else "not set" if value is None else json.dumps(value)


def _default_config(name: str) -> dict[str, object]:
    """Return the default configuration of a queue of this name."""
    from sluice.queues.service import read_config

    return dict(_flatten(read_config({"name": name}).as_dict()))
