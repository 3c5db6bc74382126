"""Show results of pipelines as tables on a terminal; `--json` prints their summaries instead."""

from __future__ import annotations

from typing import Any, Final

from sluice.cli.support import (
    BAD,
    FAINT,
    GOOD,
    Column,
    CommandContext,
    facts_table,
    format_count,
    format_duration,
    format_payload,
    format_plural,
    styled,
    table,
)

SHOWN_ROWS: Final = 20
COUNT_KEY: Final = "letters"  # words: allowed (JSON key)
ID_KEY: Final = "letter"  # words: allowed (JSON key)


def show_causes(cli: CommandContext, summary: dict[str, Any]) -> None:
    if not summary[COUNT_KEY]:
        cli.out.show("No dead letters.")
        return
    columns = [Column("dead letters", number=True), Column("queue"), Column("reason", style=BAD)]
    columns += [
        Column("groups"),
        Column("since"),
        Column("latest"),
        Column("description", cut=True),
    ]
    rows = [
        [
            format_count(one[COUNT_KEY]),
            one["queue"],
            one["reason"],
            ", ".join(one["groups"]),
            _short_time(one["since"]),
            _short_time(one["until"]),
            one["cause"],
        ]
        for one in summary["causes"][:SHOWN_ROWS]
    ]
    cli.out.show(table(columns, rows, cli.out.width))
    causes = format_plural(summary["kinds"], "cause")
    cli.out.show(
        styled(f"{format_plural(summary[COUNT_KEY], 'dead letter')}, {causes}", style="bold")
    )
    if summary["kinds"] > len(rows):
        cli.out.note(f"The {len(rows)} most frequent are shown; a report (--to FILE) has more.")


def show_repair(cli: CommandContext, total: int, some: list[dict[str, Any]]) -> None:
    columns = [
        Column("dead letter"),
        Column("to"),
        Column("", style=FAINT),
        Column("payload", cut=True),
    ]
    rows: list[list[str]] = []
    for one in some:
        before, after = (
            format_payload(text, len(text or ""), cli.out.payload_width)
            for text in (one["before"], one["after"])
        )
        rows += [[one[ID_KEY], one["queue"] or "?", "is", before]]
        rows += [["", "", "becomes", after]] if before != after else []
    if rows:
        cli.out.show(table(columns, rows, cli.out.width))
    cli.out.show(styled(f"{format_plural(total, 'dead letter')} in all", style="bold"))


def show_flow(cli: CommandContext, rows: list[dict[str, Any]]) -> None:
    if not rows:
        cli.out.show("Nothing has come through.")
        return
    heads = ("messages", "bytes", "p50", "p90", "p99", "slowest")
    columns = [Column("window"), Column("queue"), *(Column(head, number=True) for head in heads)]
    shown = [
        [
            _short_time(one["start"].isoformat()),
            one["queue"],
            format_count(one["messages"]),
            format_count(one["bytes"] or 0),
            *(
                "" if one[name] is None else format_duration(one[name])
                for name in ("p50", "p90", "p99", "slowest")
            ),
        ]
        for one in rows[-SHOWN_ROWS:]
    ]
    cli.out.show(table(columns, shown, cli.out.width))
    if len(rows) > SHOWN_ROWS:
        cli.out.note(
            f"The {SHOWN_ROWS} newest of {format_count(len(rows))} are shown;"
            " a report (--to FILE) has more."
        )


def show_audit(cli: CommandContext, summary: dict[str, Any], meanings: dict[str, str]) -> None:
    cli.out.show(
        facts_table([(name, format_count(number)) for name, number in summary["ids"].items()])
    )
    columns = [
        Column("found", number=True),
        Column("what"),
        Column("meaning", style=FAINT),
        Column("such as", cut=True),
    ]
    rows = [
        [
            styled(format_count(number), BAD if number else GOOD),
            name,
            meanings[name],
            ", ".join(summary["examples"].get(name, [])),
        ]
        for name, number in summary["faults"].items()
    ]
    cli.out.show(table(columns, rows, cli.out.width))
    good, bad = "Nothing is missing, nothing is double.", "Something is wrong."
    cli.out.show(styled(good if summary["ok"] else bad, GOOD if summary["ok"] else BAD))


def _short_time(text: str | None) -> str:
    return "" if text is None else text[:19].replace("T", " ")
