"""`sluice top`: all queues, live, updated each second. `q` ends it.

One thread receives frames from the broker, the main thread draws and reads the keyboard. The header
shows a lost connection, and the thread reconnects, because users watch a broker through its
restarts.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from rich.cells import cell_len
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sluice.cli.support import (
    BAD,
    FAINT,
    WARN,
    Column,
    CommandContext,
    CommandError,
    command,
    format_count,
    format_duration,
    format_plural,
    format_rate,
    sparkline,
    styled,
    table,
    to_timestamp,
)

HISTORY_FRAMES: Final = 120
RETRY_SECONDS: Final = 1.0
SORT_ORDERS: Final = ("depth", "name", "in", "out", "dead")

COLUMN_HEADS: Final = ("depth", "trend", "in/s", "acked/s", "out", "retry", "dead", "consumers")
DROPPABLE_COLUMNS: Final = ("trend", "out", "retry", "in/s", "acked/s", "consumers")
MIN_NAME_WIDTH: Final = 20
MIN_TREND_WIDTH: Final = 8

Frame = dict[str, Any]


def add_to(root: typer.Typer, panel: str) -> None:
    command(root, "top", rich_help_panel=panel)(top)


class History:
    """The depth of each queue over the last frames."""

    def __init__(self) -> None:
        self._depths: dict[str, deque[float]] = {}

    def add(self, frame: Frame) -> None:
        present = {row["name"] for row in frame["queues"]}
        for gone in self._depths.keys() - present:
            del self._depths[gone]
        for row in frame["queues"]:
            self._depths.setdefault(row["name"], deque(maxlen=HISTORY_FRAMES)).append(
                row["total_messages"]
            )

    def of(self, name: str) -> list[float]:
        return list(self._depths.get(name, ()))


def top(
    cli: CommandContext,
    once: Annotated[bool, typer.Option("--once", help="One frame, then end.")] = False,
    order: Annotated[
        str, typer.Option("--sort", metavar="ORDER", help="depth, name, in, out or dead.")
    ] = "depth",
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Dead-letter queues as well.")
    ] = False,
) -> None:
    """Watch the queues: depth and its curve, rates, consumers, dead letters. Each second; q ends
    it.
    """
    if order not in SORT_ORDERS:
        raise CommandError(
            f"--sort {order!r} is not a sort order",
            f"Choose one of {', '.join(SORT_ORDERS)}",
            code=2,
        )
    if cli.as_json or once or not cli.out.console.is_terminal:
        for frame in _frames(cli):
            if cli.as_json:
                cli.out.print_json_line(frame)
            else:
                cli.out.show(
                    _render(frame, History(), cli.out.console.width, 0, order, everything, "")
                )
            if once or not cli.as_json:
                return
        return
    _watch(cli, order, everything)


def _frames(cli: CommandContext) -> Iterator[Frame]:
    for name, data in cli.api.events("/live"):
        if name == "queues":
            yield data


def _watch(cli: CommandContext, order: str, everything: bool) -> None:
    from rich.live import Live

    incoming: queue.SimpleQueue[Frame | CommandError] = queue.SimpleQueue()
    # An error of the first request is reported as for any command.
    incoming.put(next(_frames(cli), None) or CommandError("the broker ended the stream"))
    threading.Thread(target=_receive_frames, args=(cli, incoming), daemon=True).start()
    history, error = History(), ""
    frame: Frame = {"node": {}, "queues": []}
    console = cli.out.console
    with _single_keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            pressed = key(0.1)
            if pressed in ("q", "Q", "\x1b", "\x03"):
                return
            if pressed in ("s", "S"):
                order = SORT_ORDERS[(SORT_ORDERS.index(order) + 1) % len(SORT_ORDERS)]
            elif pressed in ("a", "A"):
                everything = not everything
            while not incoming.empty():
                news = incoming.get()
                error = news.what if isinstance(news, CommandError) else ""
                if not isinstance(news, CommandError):
                    frame = news
                    history.add(frame)
            size = console.size
            live.update(
                _render(frame, history, size.width, size.height, order, everything, error),
                refresh=True,
            )


def _receive_frames(cli: CommandContext, incoming: queue.SimpleQueue[Frame | CommandError]) -> None:
    while True:
        try:
            for frame in _frames(cli):
                incoming.put(frame)
            incoming.put(CommandError("the broker ended the stream"))
        except CommandError as failure:
            incoming.put(failure)
        except (
            Exception
            # The stream was closed because the command ends, or a frame is invalid.
        ) as fault:
            incoming.put(CommandError(f"the stream cannot be read ({type(fault).__name__})"))
        time.sleep(RETRY_SECONDS)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key, without Enter and echo; "" if there is
    none.
    """
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield _no_key
        return
    before = termios.tcgetattr(descriptor)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    tty.setcbreak(descriptor)
    try:
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _render(
    frame: Frame,
    history: History,
    width: int,
    height: int,
    order: str,
    everything: bool,
    error: str,
) -> RenderableType:
    rows = [row for row in frame["queues"] if everything or not row["is_dead_letters"]]
    rows.sort(key=lambda row: _rank(row, order))
    max_rows = max(1, height - 5) if height else len(rows)
    parts: list[RenderableType] = [_head(frame, error), ""]
    if rows:
        parts.append(_grid(rows[:max_rows], history, width))
    else:
        parts.append(styled("No queues yet.", style=FAINT))
    if height:
        hidden = (
            f"{format_plural(len(rows) - max_rows, 'more queue')}   "
            if len(rows) > max_rows
            else ""
        )
        parts += [
            "",
            styled(f"{hidden}q quit   s sort ({order})   a dead-letter queues", style=FAINT),
        ]
    return Stack(*parts)


def _rank(row: Frame, order: str) -> tuple[float, str]:
    value = {
        "depth": row["total_messages"],
        "name": 0,
        "in": row["enqueue_rate"],
        "out": row["ack_rate"],
        "dead": row["dlq_messages"],
    }[order]
    return -value, row["name"]


def _head(frame: Frame, error: str) -> Text:
    if error:
        return styled(f"{error}; trying again", style=BAD)
    node = frame["node"]
    if not node:
        return styled("waiting for the broker", style=FAINT)
    up = format_duration(to_timestamp(node["now"]) - to_timestamp(node["started_at"]))
    rows = frame["queues"]
    head = styled(f"{node['name']}", style="bold")
    head.append(
        f"  {node['version']}  up {up}  {format_plural(node['connections'], 'connection')}  ",
        style="not bold",
    )
    head.append(
        f"{format_rate(sum(row['enqueue_rate'] for row in rows))}/s in"
        f"  {format_rate(sum(row['ack_rate'] for row in rows))}/s acked",
        style="not bold",
    )
    return head


def _grid(rows: list[Frame], history: History, width: int) -> Table:
    """Lay out one line per queue: a name that folds would push rows off the screen.

    In a narrow window columns are dropped before the name is cut.
    """
    shown = [_cells(row) for row in rows]
    depth_history = [history.of(row["name"]) for row in rows]
    # A single frame has no trend.
    heads = [head for head in COLUMN_HEADS if head != "trend" or any(depth_history)]
    for dropped in DROPPABLE_COLUMNS:
        if _width(heads, shown) + MIN_NAME_WIDTH <= width:
            break
        heads = [head for head in heads if head != dropped]
    longest = max(cell_len(row["queue"].plain) for row in shown)
    bars = max(MIN_TREND_WIDTH, min(40, width - _width(heads, shown) - longest + MIN_TREND_WIDTH))
    for row, depths in zip(shown, depth_history, strict=True):
        row["trend"] = Text(sparkline(depths, bars))
    columns = [Column("queue", cut=True)]
    columns += [
        Column(head, number=True, style="cyan" if head == "trend" else "") for head in heads
    ]
    return table(columns, [[row[head] for head in ("queue", *heads)] for row in shown], width)


def _cells(row: Frame) -> dict[str, Text]:
    has_no_consumers = (
        row["total_messages"] > 0 and not row["active_consumers"] and not row["is_dead_letters"]
    )
    return {
        "queue": styled(row["name"]),
        "depth": styled(
            format_count(row["total_messages"]),
            style=BAD if row["total_messages"] >= row["max_depth"] else "",
        ),
        "in/s": styled(format_rate(row["enqueue_rate"])),
        "acked/s": styled(format_rate(row["ack_rate"])),
        "out": styled(format_count(row["inflight_messages"])),
        "retry": styled(format_count(row["retrying"]), style=WARN if row["retrying"] else ""),
        "dead": styled(format_count(row["dlq_messages"]), style=BAD if row["dlq_messages"] else ""),
        "consumers": styled(
            format_count(row["active_consumers"]), style=WARN if has_no_consumers else ""
        ),
    }


def _width(heads: list[str], rows: list[dict[str, Text]]) -> int:
    """Return the width of all columns but the name, with the narrowest trend."""
    return sum(
        2
        + (
            MIN_TREND_WIDTH
            if head == "trend"
            else max([len(head), *(cell_len(row[head].plain) for row in rows)])
        )
        for head in heads
    )
