"""Run the comparison and write the page. `bench/compare` prepares the build and calls this."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

from comparison import chart, page, peers, running
from comparison.ratios import Rows
from comparison.running import ROOT, say
from sluice.bench.machine import Disk, inspect_disk, inspect_machine

PARTS = ("own", "plain", "queues", "fresh", "jobs")
# Starting RabbitMQ for each run would take minutes.
FRESH_PEERS = (
    "mosquitto",
    "redis-everysec",
    "nats-js",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench/compare", description="Sluice beside others, into docs/performance.md."
    )
    parser.add_argument(
        "--harness",
        default=os.environ.get("HARNESS", ""),
        help="folder of the load harness ($HARNESS)",
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--secs", type=float, default=1.0, help="of each run")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance.md")
    parser.add_argument("--raw", type=Path, help="write the raw lines to this file")
    parser.add_argument(
        "--from", dest="source", type=Path, help="make the page from such a file, and run nothing"
    )
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(
            f"there are no parts {', '.join(sorted(unknown))}; choose of {', '.join(PARTS)}"
        )
    if given.source:
        saved = json.loads(given.source.read_text())
        write(given.page, saved["lines"], saved["facts"], saved["left_out"])
        return
    harness = Path(given.harness).resolve() if given.harness else None
    if harness is None:
        show_plain(given.rounds, given.secs)
        return
    if not (harness / "compare.py").exists():
        parser.error(f"{given.harness} is not the load harness; bench/README.md describes it")
    began = time.monotonic()
    if "own" in parts:
        measure_own(given.page)
        parts.remove("own")
    if not parts:
        return
    with running.scratch() as folder:
        lines, facts, left_out = measure(harness, folder, parts, given.rounds, given.secs)
    minutes = (time.monotonic() - began) / 60
    facts.append(
        f"made by `HARNESS=FOLDER bench/compare --rounds {given.rounds} --secs {given.secs:g}`,"
        f" {minutes:.0f} minutes"
    )
    if given.raw:
        given.raw.write_text(json.dumps({"facts": facts, "left_out": left_out, "lines": lines}))
    write(given.page, lines, facts, left_out)


def measure(
    harness: Path, folder: Path, parts: list[str], rounds: int, secs: float
) -> tuple[list[dict[str, object]], list[str], list[str]]:
    here, left_out = peers.split()
    python = peers.peers_python(ROOT)
    libraries, missing, versions = peers.split_libraries(python)
    if "jobs" in parts:
        left_out += missing
    for line in left_out:
        say(f"! {line}")
    facts = [
        *machine_facts(inspect_disk(folder)),
        versions_text(here, versions if "jobs" in parts else {}),
    ]
    for fact in facts:
        say(f"  {fact}")
    bin_ = running.build(harness, folder)
    lines: list[dict[str, object]] = []
    targets = ["sluice", *(peer.target for peer in here)]
    plain = [
        target
        for target in targets
        if target in ("sluice", "mosquitto", "nats-mqtt", "rabbitmq-mqtt")
    ]
    queues = [target for target in targets if not target.endswith("-mqtt")]
    if "plain" in parts:
        lines += running.run_brokers(harness, bin_, folder, plain, list(page.PLAIN), rounds, secs)
    if "queues" in parts:
        cases = [*page.QUEUES, page.LATENCY]
        lines += running.run_brokers(harness, bin_, folder, queues, cases, rounds, secs)
    if "fresh" in parts:
        some = [target for target in targets if target == "sluice" or target in FRESH_PEERS]
        lines += running.run_brokers(
            harness, bin_, folder, some, list(page.FRESH), 1, secs, with_apis=False
        )
    if "jobs" in parts and any(peer.program == "redis-server" for peer in here):
        lines += running.run_workers(harness, folder, python, libraries, min(rounds, 2))
    return lines, facts, left_out


def measure_own(target: Path) -> None:
    """Run `sluice bench` and insert its table and chart."""
    chart_file = target.parent / "images/bench.svg"
    say("  sluice bench")
    command = [
        "sluice",
        "bench",
        "--json",
        "--seconds",
        "2",
        "--data",
        str(ROOT),
        "--plot",
        str(chart_file),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit("sluice bench did not end well: the page stays as it is")
    made = page.own_table(json.loads(done.stdout), f"images/{chart_file.name}")
    target.write_text(page.replace_between_marks(target.read_text(), made, page.OWN))


def show_plain(rounds: int, secs: float) -> None:
    """Print a table on stdout without the load harness. The page stays as it is."""
    here, left_out = peers.split(tuple(peer for peer in peers.PEERS if peer.target == "mosquitto"))
    if not here:
        raise SystemExit(left_out[0])
    say(
        "! only mosquitto is compared: the others need the load harness, whose folder HARNESS names"
    )
    with running.scratch() as folder:
        lines = running.run_plain(folder, rounds, secs)
    print(page.plain_table(Rows(lines)))


def machine_facts(disk: Disk) -> list[str]:
    build = subprocess.run(
        ["sluice", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    machine = inspect_machine("compiled" if "compiled" in build else "interpreted")
    facts = [
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB; "
        f"{machine.kernel}, {machine.python}; {disk.filesystem}, "
        f"one fdatasync {disk.sync_median_ms:.2f} ms (p99 {disk.sync_p99_ms:.2f})",
        f'{build}, HTTP and gRPC open, `durability = "sync"`; '
        "broker on one core, generator on another",
    ]
    return facts + [f"**{warning}**" for warning in machine.warnings]


def versions_text(here: list[peers.Peer], libraries: dict[str, str]) -> str:
    programs = {peer.program: peer.name.partition(",")[0].partition(" ")[0] for peer in here}
    found = [f"{name} {peers.version_of(program)}" for program, name in programs.items()]
    return ", ".join([*found, *(f"{name} {version}" for name, version in libraries.items())])


def write(
    target: Path, lines: list[dict[str, object]], facts: list[str], left_out: list[str]
) -> None:
    rows = Rows(lines)
    for failed in rows.failed:
        say(f"! {failed['case']}, {failed['target']}, round {failed['round']}: {failed['error']}")
    if not rows.targets("ps1_4x4") and not rows.targets("q1k") and not rows.targets(page.JOBS):
        raise SystemExit("nothing was measured: the page stays as it is")
    chart_file = target.parent / "images/compare.svg"
    chart_file.write_text(chart.draw(page.groups(rows)))
    made = page.tables(rows, facts, left_out, f"images/{chart_file.name}")
    target.write_text(page.replace_between_marks(target.read_text(), made))
    say(f"wrote {os.path.relpath(target)} and {os.path.relpath(chart_file)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
