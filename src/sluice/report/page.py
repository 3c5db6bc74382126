"""A report as one HTML file with style sheet, facts, charts and tables; it loads nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from sluice.errors import ConfigError
from sluice.report.dot_charts import read_theme
from sluice.report.formatting import format_time
from sluice.report.markup import Markup, Piece, element


@dataclass(frozen=True)
class Column:
    head: str
    number: bool = False
    code: bool = False
    wide: bool = False  # gets the remaining width


def facts(pairs: Sequence[tuple[str, str]]) -> Markup:
    """Render the key figures as a strip across the page."""
    return element(
        "dl",
        [
            element("div", element("dt", name), element("dd", value, class_="num"))
            for name, value in pairs
        ],
        class_="facts",
    )


def table(
    caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Piece]], note: str = ""
) -> Markup:
    def kind(column: Column) -> str | None:
        names = [
            name
            for name, wanted in (
                ("num", column.number),
                ("code", column.code),
                ("wide", column.wide),
            )
            if wanted
        ]
        return " ".join(names) or None

    heads = [
        element("th", column.head, scope="col", class_="num" if column.number else None)
        for column in columns
    ]
    lines = [
        element(
            "tr", [element("td", cell, class_=kind(column)) for column, cell in zip(columns, row)]
        )
        for row in rows
    ]
    return element(
        "section",
        element("h2", caption),
        element("p", note, class_="soft") if note else None,
        element(
            "div",
            element("table", element("thead", element("tr", heads)), element("tbody", lines)),
            class_="table-box",
        ),
    )


def section(title: str, *inside: Piece) -> Markup:
    return element("section", element("h2", title), inside)


def tag(text: str, tone: int) -> Markup:
    return element("span", element("span", class_=f"swatch tone-{tone % 8}"), text, class_="tag")


def render(title: str, subtitle: str, *inside: Piece, made_at: datetime | None = None) -> str:
    """Render the whole file."""
    style = read_theme() + files("sluice.report").joinpath("report.css").read_text("utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{title} · Sluice"),
        Markup(f"<style>\n{style}</style>"),
    )
    body = element(
        "body",
        element("header", _brand(), element("h1", title), element("p", subtitle, class_="soft")),
        element("main", inside),
        element(
            "footer",
            f"Made by Sluice at {format_time(made_at or datetime.now(UTC))}. All times are UTC.",
            class_="soft",
        ),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def check_writable(path: Path) -> None:
    """Check that a report can be written to `path`, before the work begins."""
    if path.is_dir():
        raise ConfigError(
            f"{path} is a directory", "Name a file for the report, such as report.html"
        )
    folder = next((one for one in path.absolute().parents if one.exists()), path)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{path} cannot be written: {folder} is not a writable directory", "Name another file"
        )


def save(page: str, path: Path) -> None:
    """Write the file atomically: a reader that reloads meanwhile sees the old report."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(page, "utf-8")
        fresh.replace(path)
    except OSError as fault:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} cannot be written: {fault.strerror}", "Name another file"
        ) from None


def _brand() -> Markup:
    return element(
        "p",
        element(
            "svg",
            element("path", d="M3 4v16M21 4v16", class_="mark-post"),
            element("path", d="M6.5 4h11v7h-11z", class_="mark-gate"),
            element(
                "path",
                d="M6.5 15.5q2.75-2 5.5 0t5.5 0M6.5 19.5q2.75-2 5.5 0t5.5 0",
                class_="mark-water",
            ),
            viewBox="0 0 24 24",
            width=20,
            height=20,
            aria_hidden="true",
        ),
        "Sluice",
        class_="brand",
    )
