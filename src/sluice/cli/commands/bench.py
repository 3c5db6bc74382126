"""`sluice bench`: measure the broker on this machine, with a broker of its own or a running one.

Everything that it starts or creates is stopped and removed, after Ctrl-C and SIGTERM too. Exit code
5: a message was lost, doubled, out of order or refused, and the figures are worthless.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sluice.cli.commands.bench_tables import (
    measurement_warnings,
    result_table,
    run_facts,
    scenario_notes,
    warning_line,
)
from sluice.cli.serve import build
from sluice.cli.support import (
    EXIT_FINDINGS,
    EXIT_UNREACHABLE,
    CommandError,
    Json,
    Output,
    exit_on_error,
    usage_error,
)

if TYPE_CHECKING:
    from sluice.bench.measured_broker import MeasuredBroker
    from sluice.bench.results import Result
    from sluice.bench.scenarios import ScenarioSizes

SCENARIO_NAMES: Final = (
    *("pubsub", "queue", "strict", "fan-out", "compacted"),
    *("backlog", "many-queues", "idle", "latency"),
)
# Scenarios that leave no queues in a broker that is not ours.
LEAVES_NO_QUEUES: Final = frozenset({"pubsub", "fan-out", "idle"})
MIN_PAYLOAD_BYTES: Final = 24


def add_to(root: typer.Typer, panel: str) -> None:
    root.command("bench", rich_help_panel=panel)(bench)


def bench(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO", help=f"Of {', '.join(SCENARIO_NAMES)}; all unless named."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure a running broker: mqtt://USER:PASSWORD@HOST:PORT, or mqtts://.",
        ),
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(
            min=1, help="Process of that broker, if it is on this machine: for its CPU and memory."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where our own broker keeps its data; the current directory unless given.",
        ),
    ] = None,
    durability: Annotated[
        str, typer.Option(help="sync or interval: when a publish to a queue is answered.")
    ] = "sync",
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="How long each scenario is measured.")
    ] = 5.0,
    messages: Annotated[
        int | None, typer.Option(min=1, help="Messages of each scenario, instead of a time.")
    ] = None,
    payload: Annotated[
        int, typer.Option(min=MIN_PAYLOAD_BYTES, max=1 << 24, help="Bytes of each message.")
    ] = 1000,
    rate: Annotated[
        float, typer.Option(min=1, help="Messages per second of the scenario latency.")
    ] = 1000.0,
    connections: Annotated[int, typer.Option(min=1, help="Of the scenario idle.")] = 5000,
    generators: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Processes that make the load; by the number of cores unless given."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A second each, and less of everything.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the results into this file, as SVG.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure the broker here: messages per second and per CPU-second, latency, losses."""
    with exit_on_error("the benchmark"), _interrupt_on_sigterm():
        chosen = _select_scenarios(scenarios)
        if durability not in ("sync", "interval"):
            raise usage_error(f"--durability {durability} is none", "Use sync or interval")
        if url is not None and data is not None:
            raise usage_error(
                "--data is for our own broker, and --url names another", "Leave one of them out"
            )
        if pid is not None and url is None:
            raise usage_error(
                "--pid is the process of the broker that --url names", "Add --url, or leave it out"
            )
        if pid is not None and not Path(f"/proc/{pid}").exists():
            raise usage_error(
                f"there is no process {pid} here", "Leave --pid out if the broker is elsewhere"
            )
        if plot is not None and (
            plot.suffix.lower() != ".svg" or not plot.absolute().parent.is_dir()
        ):
            raise usage_error(
                f"{plot} cannot be drawn",
                "Name a file that ends in .svg, in a directory that is there",
            )
        from sluice.bench.measurement import Timing
        from sluice.bench.scenarios import ScenarioSizes

        sizes = ScenarioSizes(
            payload, Timing(seconds, messages=messages), rate=rate, connections=connections
        )
        if quick:
            timing = replace(sizes.timing, seconds=min(seconds, 1.0), warm_seconds=0.3)
            sizes = replace(
                sizes, timing=timing, backlog=20_000, queues=100, connections=min(connections, 500)
            )
        _BenchRun(chosen, sizes, durability, generators, plot, Output(json)).execute(url, pid, data)


def _select_scenarios(scenarios: Sequence[str] | None) -> list[str]:
    for name in scenarios or ():
        if name not in SCENARIO_NAMES:
            raise usage_error(
                f"there is no scenario {name!r}", f"Choose of {', '.join(SCENARIO_NAMES)}"
            )
    return [name for name in SCENARIO_NAMES if not scenarios or name in scenarios]


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that everything is cleaned up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _BenchRun:
    def __init__(
        self,
        chosen: Sequence[str],
        sizes: ScenarioSizes,
        durability: str,
        generators: int | None,
        plot: Path | None,
        output: Output,
    ) -> None:
        self._chosen = chosen
        self._sizes = sizes
        self._durability = durability
        self._processes = generators or max(1, min(4, len(os.sched_getaffinity(0)) - 1))
        self._plot = plot
        self._output = output

    def execute(self, url: str | None, pid: int | None, data: Path | None) -> None:
        from sluice.bench.machine import inspect_disk, inspect_machine
        from sluice.bench.measured_broker import BrokerUnreachable, scratch_directory, start_broker
        from sluice.bench.results import disturbances

        machine = inspect_machine(build())
        with ExitStack() as stack:
            disk = None
            brokers: Callable[[], AbstractContextManager[MeasuredBroker]]
            if url is None:
                folder = stack.enter_context(scratch_directory(data))
                disk = inspect_disk(folder)
                # A new broker for each scenario.
                brokers = partial(start_broker, folder, self._durability)
            else:
                brokers = partial(_keep_running, _existing_broker(url, pid))
            seen = url is None or pid is not None
            warnings = [*machine.warnings, *measurement_warnings(disk, seen)]
            if not self._output.as_json:
                self._output.show(run_facts(machine, disk, url, self._durability, self._processes))
                self._output.show(*(warning_line("! ", text) for text in warnings))
            try:
                run, results = self._measure(brokers)
            except BrokerUnreachable as fault:
                raise CommandError(fault.what, fault.remedy, EXIT_UNREACHABLE) from None
        disturbed = disturbances(results)
        document = {
            "machine": asdict(machine),
            "disk": None if disk is None else asdict(disk),
            "durability": self._durability,
            "broker": {"ours": url is None, "seen": seen},
            "settings": {**asdict(self._sizes), "generators": self._processes},
            "warnings": [*warnings, *disturbed],
            "results": [{**asdict(result), "whole": result.is_correct} for result in results],
        }
        if self._output.as_json:
            self._output.print_json(document)
        else:
            self._output.show("", result_table(results, self._output.width), "")
            self._output.show(*scenario_notes(results, disturbed))
        if url is not None and not LEAVES_NO_QUEUES.issuperset(self._chosen):
            self._output.note(
                f"The queues bench/{run}/... stay in that broker, empty:"
                " `sluice queue list` shows them, `sluice queue delete` removes them."
            )
        if self._plot is not None:
            from sluice.bench.chart import draw_chart

            self._plot.write_text(draw_chart(document), "utf-8")
            self._output.note(f"Drawn into {self._plot}.")
        if not all(result.is_correct for result in results):
            raise CommandError(
                "messages were lost, doubled, out of order or refused:"
                " these figures are worth nothing",
                "Repeat it; if it happens again, it is a fault of the broker, and worth a report",
                EXIT_FINDINGS,
            )

    def _measure(
        self, brokers: Callable[[], AbstractContextManager[MeasuredBroker]]
    ) -> tuple[int, list[Result]]:
        from sluice.bench.scenarios import SCENARIOS, Bench

        run = random.getrandbits(30)
        results: list[Result] = []
        with _progress() as progress:
            task = progress.add_task("", total=len(self._chosen), so_far="")
            for name in self._chosen:
                progress.update(task, description=name, so_far="")

                def on_progress(count: int) -> None:
                    progress.update(task, so_far=f"{count:,} messages")

                with brokers() as target:
                    one = Bench(
                        target, self._sizes, self._durability, self._processes, on_progress, run
                    )
                    results += SCENARIOS[name](one)
                progress.advance(task)
        return run, results


def _existing_broker(url: str, pid: int | None) -> MeasuredBroker:
    from sluice.bench.measured_broker import MeasuredBroker, parse_address

    try:
        return MeasuredBroker(parse_address(url), pid)
    except ValueError:
        raise usage_error(
            "--url is not the MQTT address of a broker", "Write it as mqtt://127.0.0.1:1883"
        ) from None


@contextmanager
def _keep_running(target: MeasuredBroker) -> Iterator[MeasuredBroker]:
    """Yield a broker that is neither started nor stopped here."""
    yield target


def _progress() -> Progress:
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[so_far]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
