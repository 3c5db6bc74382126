"""What pipelines have found, as tables on a terminal. The same as JSON is the summary that each pipeline gives."""

from __future__ import annotations

from typing import Any, Final

from sluice.cli.support.output import BAD, FAINT, GOOD, Column, facts, styled, table
from sluice.cli.support.command import Visit
from sluice.cli.support.formatting import count, duration, one_line, plural

SHOWN: Final = 20


def show_causes(visit: Visit, told: dict[str, Any]) -> None:
    if not told["letters"]:
        visit.out.show("No dead letters.")
        return
    columns = [Column("letters", number=True), Column("queue"), Column("reason", style=BAD)]
    columns += [Column("groups"), Column("since"), Column("latest"), Column("what was said", cut=True)]
    rows = [
        [
            count(one["letters"]),
            one["queue"],
            one["reason"],
            ", ".join(one["groups"]),
            _short_time(one["since"]),
            _short_time(one["until"]),
            one["cause"],
        ]
        for one in told["causes"][:SHOWN]
    ]
    visit.out.show(table(columns, rows, visit.out.width))
    causes = plural(told["kinds"], "cause")
    visit.out.show(styled(f"{plural(told['letters'], 'dead letter')}, {causes}", style="bold"))
    if told["kinds"] > len(rows):
        visit.out.note(f"The {len(rows)} most frequent are shown; a report (--to FILE) has more.")


def show_repair(visit: Visit, total: int, some: list[dict[str, Any]]) -> None:
    columns = [Column("dead letter"), Column("to"), Column("", style=FAINT), Column("payload", cut=True)]
    rows: list[list[str]] = []
    for one in some:
        before, after = (
            one_line(text, len(text or ""), visit.out.payload_width) for text in (one["before"], one["after"])
        )
        rows += [[one["letter"], one["queue"] or "?", "is", before]]
        rows += [["", "", "becomes", after]] if before != after else []
    if rows:
        visit.out.show(table(columns, rows, visit.out.width))
    visit.out.show(styled(f"{plural(total, 'dead letter')} in all", style="bold"))


def show_flow(visit: Visit, rows: list[dict[str, Any]]) -> None:
    if not rows:
        visit.out.show("Nothing has come through.")
        return
    heads = ("messages", "bytes", "p50", "p90", "p99", "slowest")
    columns = [Column("window"), Column("queue"), *(Column(head, number=True) for head in heads)]
    shown = [
        [
            _short_time(one["start"].isoformat()),
            one["queue"],
            count(one["messages"]),
            count(one["bytes"] or 0),
            *("" if one[name] is None else duration(one[name]) for name in ("p50", "p90", "p99", "slowest")),
        ]
        for one in rows[-SHOWN:]
    ]
    visit.out.show(table(columns, shown, visit.out.width))
    if len(rows) > SHOWN:
        visit.out.note(f"The {SHOWN} newest of {count(len(rows))} are shown; a report (--to FILE) has more.")


def show_verdict(visit: Visit, told: dict[str, Any], words: dict[str, str]) -> None:
    visit.out.show(facts([(name, count(number)) for name, number in told["ids"].items()]))
    columns = [
        Column("found", number=True),
        Column("what"),
        Column("meaning", style=FAINT),
        Column("such as", cut=True),
    ]
    rows = [
        [
            styled(count(number), BAD if number else GOOD),
            name,
            words[name],
            ", ".join(told["examples"].get(name, [])),
        ]
        for name, number in told["faults"].items()
    ]
    visit.out.show(table(columns, rows, visit.out.width))
    good, bad = "Nothing is missing, nothing is double.", "Something is wrong."
    visit.out.show(styled(good if told["ok"] else bad, GOOD if told["ok"] else BAD))


def _short_time(text: str | None) -> str:
    return "" if text is None else text[:19].replace("T", " ")
