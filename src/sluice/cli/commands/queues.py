"""`sluice queue ...`: make, see, change, empty and remove queues."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from sluice.cli.support.rest_client import of_queue
from sluice.cli.support.completion import Queue
from sluice.cli.support.errors import wrong_command
from sluice.cli.commands.groups import group_table
from sluice.cli.support.options import Yes
from sluice.cli.support.output import BAD, FAINT, WARN, Column, facts, styled, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import ago, count, plural, rate, size

app = typer.Typer(no_args_is_help=True, help="Make, see, change, empty and remove queues.")

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Such as limits.max_queue_depth=5; can be repeated."),
]


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="queue", rich_help_panel=panel)


@command(app, "create")
def create(
    visit: Visit,
    name: Annotated[str, typer.Argument(help="Name of the new queue, such as tasks/image.")],
    config: Annotated[
        str, typer.Option(metavar="JSON|@FILE", help="Its configuration; @- reads it from stdin.")
    ] = "",
    changes: Changes = None,
) -> None:
    """Make a queue. What is not given has its default."""
    of_queue(name)  # refuses nonsense before it is sent
    wanted = {**_read_config(config), "name": name.removeprefix("$queue/")}
    made = visit.api.post("queues", _laid_over(wanted, _read_changes(changes)))
    if visit.answered(made):
        return
    stats = made["stats"]
    visit.out.show(
        f"Created {stats['name']}: {plural(stats['partitions'], 'partition')}, ordering {stats['ordering']}, "
        f"at most {plural(stats['max_depth'], 'message')}, dead letters to {stats['dlq'] or 'nowhere'}."
    )


@command(app, "list")
def list_queues(
    visit: Visit,
    prefix: Annotated[str, typer.Argument(help="Only names that begin so.")] = "",
    dead_letters: Annotated[
        bool, typer.Option("--all", "-a", help="Dead-letter queues in the list as well.")
    ] = False,
) -> None:
    """All queues, with depth, rates and consumers."""
    found = visit.api.queues(prefix.removeprefix("$queue/"))
    if visit.answered(found):
        return
    shown = [row for row in found if dead_letters or prefix or not row["is_dead_letters"]]
    if not shown:
        visit.out.show("No queues. The first publish makes one, or: sluice queue create NAME")
        return
    visit.out.show(queue_table(shown))
    hidden = len(found) - len(shown)
    if hidden:
        visit.out.note(f"{plural(hidden, 'dead-letter queue')} not shown: --all")


@command(app, "show")
def show(visit: Visit, queue: Queue) -> None:
    """One queue: figures, groups, partitions."""
    detail = visit.api.get(of_queue(queue))
    if visit.answered(detail):
        return
    stats = detail["stats"]
    dead = sum(stats["dead"].values())
    reasons = ", ".join(f"{reason} {count(number)}" for reason, number in sorted(stats["dead"].items()))
    depth = f"{count(stats['depth'])} of {count(stats['max_depth'])}, {size(stats['bytes'])}"
    full = stats["depth"] >= stats["max_depth"]
    visit.out.show(
        styled(stats["name"], style="bold"),
        facts(
            [
                ("kind", f"{stats['type']}, ordering {stats['ordering']}"),
                ("depth", styled(f"{depth}, full" if full else depth, style=BAD if full else "")),
                ("out", f"{count(stats['inflight'])} delivered, {count(stats['retrying'])} retrying"),
                (
                    "rates",
                    f"{rate(stats['enqueue_rate'])}/s in, {rate(stats['deliver_rate'])}/s delivered, "
                    f"{rate(stats['ack_rate'])}/s acked",
                ),
                (
                    "so far",
                    f"{count(stats['enqueued'])} enqueued, {count(stats['acked'])} acked, "
                    f"{count(stats['retried'])} retried, {count(stats['duplicates'])} duplicates, "
                    f"{count(stats['refused'])} refused",
                ),
                ("died", f"{count(dead)} ({reasons})" if dead else "0"),
                ("dead letters", _letters(stats)),
                (
                    "consumers",
                    f"{count(stats['active_consumers'])}, {stats['partitions_assigned']} of "
                    f"{plural(stats['partitions'], 'partition')} assigned",
                ),
                ("created", ago(stats["created_at"], visit.now)),
            ]
        ),
    )
    if detail["groups"]:
        visit.out.show("", group_table(detail["groups"], visit.now))
    kept = [row for row in detail["partitions"] if row["messages"]]
    if kept:
        columns = [Column("partition", number=True), Column("messages", number=True)]
        columns += [Column("first kept", number=True), Column("next", number=True)]
        rows = [
            [str(row["number"]), *(count(row[key]) for key in ("messages", "first", "next"))] for row in kept
        ]
        visit.out.show("", table(columns, rows))
        if len(kept) < len(detail["partitions"]):
            empty = len(detail["partitions"]) - len(kept)
            visit.out.show(styled(f"{plural(empty, 'partition')} more, empty", style=FAINT))


@command(app, "config")
def configure(visit: Visit, queue: Queue, changes: Changes = None) -> None:
    """Show a queue's configuration, or change it with --set. Changes apply at once."""
    path = of_queue(queue, "config")
    wanted = _read_changes(changes)
    config = visit.api.put(path, wanted) if wanted else visit.api.get(path)
    if visit.answered(config):
        return
    changed = dict(_leaves(wanted))
    usual = _usual(config["name"])
    rows: list[list[str | Text]] = []
    for key, value in _leaves(config):
        if wanted and not any(key == one or key.startswith(f"{one}.") for one in changed):
            continue  # after a change, only what it was about
        default = key == "name" or usual.get(key, value) == value
        style = FAINT if default and not wanted else ""
        rows.append(
            [
                styled(key, style=style),
                styled(_told(value), style=style),
                "" if default else _told(usual[key]),
            ]
        )
    visit.out.show(table([Column("key"), Column("value"), Column("default", style=FAINT)], rows))


@command(app, "purge")
def purge(visit: Visit, queue: Queue, yes: Yes = False) -> None:
    """Throw away every message that nobody works on. Dead letters stay."""
    stats = visit.api.get(of_queue(queue, "stats"))
    visit.out.confirm(f"Throw away up to {plural(stats['depth'], 'message')} of {stats['name']}?", yes)
    answer = visit.api.post(of_queue(queue, "purge"))
    if visit.answered(answer):
        return
    visit.out.show(f"Purged {plural(answer['purged'], 'message')} of {stats['name']}.")


@command(app, "delete")
def delete(visit: Visit, queue: Queue, yes: Yes = False) -> None:
    """Remove a queue with everything in it. Its dead letters stay."""
    stats = visit.api.get(of_queue(queue, "stats"))
    visit.out.confirm(f"Delete {stats['name']} and {plural(stats['depth'], 'message')} in it?", yes)
    visit.api.delete(of_queue(queue))
    if visit.answered({"deleted": stats["name"]}):
        return
    visit.out.show(f"Deleted {stats['name']}.")


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
    full = row["depth"] >= row["max_depth"]
    lonely = row["depth"] > 0 and not row["active_consumers"] and not row["is_dead_letters"]
    return [
        row["name"],
        styled(count(row["depth"]), style=BAD if full else ""),
        count(row["inflight"]),
        styled(count(row["retrying"]), style=WARN if row["retrying"] else ""),
        styled(count(row["dlq_depth"]), style=BAD if row["dlq_depth"] else ""),
        rate(row["enqueue_rate"]),
        rate(row["ack_rate"]),
        styled(count(row["active_consumers"]), style=WARN if lonely else ""),
    ]


def _letters(stats: Mapping[str, Any]) -> str | Text:
    if not stats["dlq"]:
        return "no dead-letter queue"
    told = f"{count(stats['dlq_depth'])} in {stats['dlq']}"
    return styled(told, style=BAD) if stats["dlq_depth"] else told


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
        raise wrong_command(
            f"--config is not JSON: {fault}", "Write it as '{\"partitions\": 4}', or @file"
        ) from None
    if not isinstance(config, dict):
        raise wrong_command("--config is not a JSON object", "Write it as '{\"partitions\": 4}', or @file")
    return config


def _read_changes(given: list[str] | None) -> dict[str, object]:
    """`limits.max_queue_depth=5` as {"limits": {"max_queue_depth": 5}}. A value that is no JSON is text: 5s, strict."""
    tree: dict[str, object] = {}
    for change in given or []:
        key, equals, text = change.partition("=")
        if not equals or not all(key.split(".")):
            raise wrong_command(f"--set {change!r} is not KEY=VALUE", "Write it as limits.max_queue_depth=5")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = _laid_over(tree, value)
    return tree


def _laid_over(base: Mapping[str, object], change: Mapping[str, object]) -> dict[str, object]:
    merged = dict(base)
    for key, value in change.items():
        before = merged.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        merged[key] = _laid_over(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _leaves(tree: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Keys with dots, those at the top first; a schema stays whole."""
    below = []
    for key, value in tree.items():
        if isinstance(value, dict) and value and key != "schema":
            below.append((key, value))
        else:
            yield above + key, value
    for key, value in below:
        yield from _leaves(value, f"{above}{key}.")


def _told(value: object) -> str:
    return value if isinstance(value, str) else "not set" if value is None else json.dumps(value)


def _usual(name: str) -> dict[str, object]:
    """What a queue of this name has by default, to tell what is its own."""
    from sluice.queues.config import read_config

    return dict(_leaves(read_config({"name": name}).shown()))
