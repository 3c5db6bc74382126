"""`sluice top`: all queues, live, as the broker tells them each second. `q` ends it.

One thread hears the broker, the main one draws and listens to the keyboard; a lost connection is told in the head of
the picture and tried again, because whoever watches a broker watches it through its restarts.
"""

from __future__ import annotations

import os
import queue as handover
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

from sluice.cli.support.errors import Failure
from sluice.cli.support.output import BAD, FAINT, WARN, Column, styled, table
from sluice.cli.support.command import Visit, command
from sluice.cli.support.formatting import count, duration, plural, rate, read_time, sparkline

REMEMBERED: Final = 120  # frames
AGAIN_SECONDS: Final = 1.0
ORDERS: Final = ("depth", "name", "in", "out", "dead")

HEADS: Final = ("depth", "trend", "in/s", "acked/s", "out", "retry", "dead", "consumers")
GIVING_WAY: Final = ("trend", "out", "retry", "in/s", "acked/s", "consumers")
LEAST_NAME: Final = 20
LEAST_TREND: Final = 8

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
            self._depths.setdefault(row["name"], deque(maxlen=REMEMBERED)).append(row["depth"])

    def of(self, name: str) -> list[float]:
        return list(self._depths.get(name, ()))


def top(
    visit: Visit,
    once: Annotated[bool, typer.Option("--once", help="One frame, then end.")] = False,
    order: Annotated[
        str, typer.Option("--sort", metavar="ORDER", help="depth, name, in, out or dead.")
    ] = "depth",
    everything: Annotated[bool, typer.Option("--all", "-a", help="Dead-letter queues as well.")] = False,
) -> None:
    """Watch the queues: depth and its curve, rates, consumers, dead letters. Each second; q ends it."""
    if order not in ORDERS:
        raise Failure(f"--sort {order!r} is no order", f"Choose one of {', '.join(ORDERS)}", code=2)
    if visit.as_json or once or not visit.out.console.is_terminal:
        for frame in _frames(visit):
            if visit.as_json:
                visit.out.line(frame)
            else:
                visit.out.show(_picture(frame, History(), visit.out.console.width, 0, order, everything, ""))
            if once or not visit.as_json:
                return
        return
    _watch(visit, order, everything)


def _frames(visit: Visit) -> Iterator[Frame]:
    for name, data in visit.api.events("live"):
        if name == "queues":
            yield data


def _watch(visit: Visit, order: str, everything: bool) -> None:
    from rich.live import Live

    arriving: handover.SimpleQueue[Frame | Failure] = handover.SimpleQueue()
    # What is wrong from the beginning is told as for any command.
    arriving.put(next(_frames(visit), None) or Failure("the broker ended the stream"))
    threading.Thread(target=_hear, args=(visit, arriving), daemon=True).start()
    history, trouble = History(), ""
    frame: Frame = {"node": {}, "queues": []}
    console = visit.out.console
    with _single_keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            pressed = key(0.1)
            if pressed in ("q", "Q", "\x1b", "\x03"):
                return
            if pressed in ("s", "S"):
                order = ORDERS[(ORDERS.index(order) + 1) % len(ORDERS)]
            elif pressed in ("a", "A"):
                everything = not everything
            while not arriving.empty():
                news = arriving.get()
                trouble = news.what if isinstance(news, Failure) else ""
                if not isinstance(news, Failure):
                    frame = news
                    history.add(frame)
            size = console.size
            live.update(
                _picture(frame, history, size.width, size.height, order, everything, trouble), refresh=True
            )


def _hear(visit: Visit, arriving: handover.SimpleQueue[Frame | Failure]) -> None:
    while True:
        try:
            for frame in _frames(visit):
                arriving.put(frame)
            arriving.put(Failure("the broker ended the stream"))
        except Failure as failure:
            arriving.put(failure)
        except Exception as fault:  # of a stream that is closed because we end, or of an answer that is none
            arriving.put(Failure(f"the stream cannot be read ({type(fault).__name__})"))
        time.sleep(AGAIN_SECONDS)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """A function that waits some seconds for one key, without Enter and without echo; "" when none was pressed."""
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


def _picture(
    frame: Frame, history: History, width: int, height: int, order: str, everything: bool, trouble: str
) -> RenderableType:
    rows = [row for row in frame["queues"] if everything or not row["is_dead_letters"]]
    rows.sort(key=lambda row: _rank(row, order))
    room = max(1, height - 5) if height else len(rows)
    parts: list[RenderableType] = [_head(frame, trouble), ""]
    if rows:
        parts.append(_grid(rows[:room], history, width))
    else:
        parts.append(styled("No queues yet.", style=FAINT))
    if height:
        hidden = f"{plural(len(rows) - room, 'more queue')}   " if len(rows) > room else ""
        parts += ["", styled(f"{hidden}q quit   s sort ({order})   a dead-letter queues", style=FAINT)]
    return Stack(*parts)


def _rank(row: Frame, order: str) -> tuple[float, str]:
    value = {
        "depth": row["depth"],
        "name": 0,
        "in": row["enqueue_rate"],
        "out": row["ack_rate"],
        "dead": row["dlq_depth"],
    }[order]
    return -value, row["name"]


def _head(frame: Frame, trouble: str) -> Text:
    if trouble:
        return styled(f"{trouble}; trying again", style=BAD)
    node = frame["node"]
    if not node:
        return styled("waiting for the broker", style=FAINT)
    up = duration(read_time(node["now"]) - read_time(node["started_at"]))
    rows = frame["queues"]
    head = styled(f"{node['name']}", style="bold")
    head.append(
        f"  {node['version']}  up {up}  {plural(node['connections'], 'connection')}  ", style="not bold"
    )
    head.append(
        f"{rate(sum(row['enqueue_rate'] for row in rows))}/s in  {rate(sum(row['ack_rate'] for row in rows))}/s acked",
        style="not bold",
    )
    return head


def _grid(rows: list[Frame], history: History, width: int) -> Table:
    """One line for each queue, whatever its name: a picture that grows out of its screen loses its end. In a narrow
    window columns give way, before the name does."""
    shown = [_cells(row) for row in rows]
    past = [history.of(row["name"]) for row in rows]
    heads = [head for head in HEADS if head != "trend" or any(past)]  # a single frame has none
    for gives_way in GIVING_WAY:
        if _width(heads, shown) + LEAST_NAME <= width:
            break
        heads = [head for head in heads if head != gives_way]
    longest = max(cell_len(row["queue"].plain) for row in shown)
    bars = max(LEAST_TREND, min(40, width - _width(heads, shown) - longest + LEAST_TREND))
    for row, depths in zip(shown, past, strict=True):
        row["trend"] = Text(sparkline(depths, bars))
    columns = [Column("queue", cut=True)]
    columns += [Column(head, number=True, style="cyan" if head == "trend" else "") for head in heads]
    return table(columns, [[row[head] for head in ("queue", *heads)] for row in shown], width)


def _cells(row: Frame) -> dict[str, Text]:
    lonely = row["depth"] > 0 and not row["active_consumers"] and not row["is_dead_letters"]
    return {
        "queue": styled(row["name"]),
        "depth": styled(count(row["depth"]), style=BAD if row["depth"] >= row["max_depth"] else ""),
        "in/s": styled(rate(row["enqueue_rate"])),
        "acked/s": styled(rate(row["ack_rate"])),
        "out": styled(count(row["inflight"])),
        "retry": styled(count(row["retrying"]), style=WARN if row["retrying"] else ""),
        "dead": styled(count(row["dlq_depth"]), style=BAD if row["dlq_depth"] else ""),
        "consumers": styled(count(row["active_consumers"]), style=WARN if lonely else ""),
    }


def _width(heads: list[str], rows: list[dict[str, Text]]) -> int:
    """What all columns but the name take, with the narrowest of trends."""
    return sum(
        2
        + (LEAST_TREND if head == "trend" else max([len(head), *(cell_len(row[head].plain) for row in rows)]))
        for head in heads
    )
