"""Run the measurements, interleaved: brokers with the load harness, job queues with workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """[[queues.templates]]
match = "bench/#"
config = { limits = { max_queue_depth = 2000000 } }
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build(harness: Path, folder: Path) -> Path:
    """Compile the generator into a folder of ours."""
    out = folder / "harness"
    out.mkdir()
    done = subprocess.run(
        ["make", "-s", "-C", str(harness), f"OUT={out}"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"the load harness does not build: {done.stderr.strip()[-300:]}")
    return out


def run_brokers(
    harness: Path,
    bin_: Path,
    folder: Path,
    targets: Sequence[str],
    cases: Sequence[str],
    rounds: int,
    secs: float,
    with_apis: bool = True,
) -> list[dict[str, Any]]:
    """Run every target once per case and round, alternating, and return the raw lines.

    A target that does not start ends a run of the harness: it is left out, and the run is repeated.
    """
    config = folder / "sluice.toml"
    config.write_text(CONFIG)
    raw = folder / f"raw-{cases[0]}.json"
    # A broker that has just opened MQTT still loads its other APIs, whose memory is not that of
    # connections.
    api_address = "127.0.0.1:0" if with_apis else "off"
    serve = (
        f"sluice serve --config {config} --log-level warning --mqtt 127.0.0.1:{{port}} "
        f"--http {api_address} --grpc {api_address} --data {{dir}}"
    )
    base = 20_000 + os.getpid() % 100 * 100  # so that two concurrent comparisons do not collide
    command = [
        sys.executable,
        str(harness / "compare.py"),
        "--custom",
        f"sluice:{base + 95}:{serve}",
    ]
    command += ["--targets", ",".join(targets), "--cases", ",".join(cases), "--rounds", str(rounds)]
    command += ["--secs", str(secs), "--baseline", "sluice", "--json", str(raw), "--timeout", "90"]
    command += ["--backlog-count", "200000"]
    environ = {
        **os.environ,
        "SL_BIN": str(bin_),
        "SL_DIR": str(folder / "run"),
        "SL_BASE_PORT": str(base),
    }
    code = run_to_its_end(command, environ, harness, folder / "run")
    lines = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    raw.unlink(missing_ok=True)
    seen = {line["target"] for line in lines}
    absent = [target for target in targets if target not in seen]
    if code and absent and absent[0] != "sluice":
        say(f"! {absent[0]} does not start, and is left out")
        rest = [target for target in targets if target != absent[0]]
        return run_brokers(harness, bin_, folder, rest, cases, rounds, secs, with_apis)
    if code:
        say(f"! the load harness ended with {code}; what it measured before that is kept")
    return lines


def run_to_its_end(
    command: list[str], environ: dict[str, str], harness: Path, brokers: Path
) -> int:
    """Run the harness, and stop its brokers on an interrupt: it starts them in sessions of their
    own.
    """
    process = subprocess.Popen(command, env=environ, stdout=sys.stderr, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        subprocess.run(
            [sys.executable, str(harness / "peers.py"), "stop", "--dir", str(brokers)], env=environ
        )
        raise


def run_workers(
    harness: Path, folder: Path, python: str, libraries: Sequence[tuple[str, str, int]], rounds: int
) -> list[dict[str, Any]]:
    """Run no-op jobs: each library with its worker on Redis, and both workers of Sluice."""
    lines: list[dict[str, Any]] = []
    with redis_server(folder) as port, sluice_broker(folder) as (address, _):
        for nth in range(rounds):
            for kind, name in (("async", "Sluice, coroutine"), ("thread", "Sluice, thread")):
                command = [sys.executable, str(ROOT / "bench/worker.py"), f"mqtt://{address}"]
                lines.append(job_line([*command, "--kind", kind, "--jobs", "20000"], name, nth))
            for module, name, jobs in libraries:
                command = [python, str(harness / "pyqueues.py"), "--redis-port", str(port)]
                lines.append(job_line([*command, "--libs", module, "--jobs", str(jobs)], name, nth))
    return [line for line in lines if line]


def job_line(command: list[str], name: str, nth: int) -> dict[str, Any]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        say(f"{name}: not finished within two minutes, and left out of round {nth + 1}")
        return {}
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not found or "jobs_per_worker_cpu_s" not in found[-1]:
        say(
            f"{name}: left out of round {nth + 1}: "
            f"{(found[-1:] or [done.stderr.strip()[-200:]])[0]}"
        )
        return {}
    figure = found[-1]["jobs_per_worker_cpu_s"]
    say(f"  {name}: {figure:,} jobs per CPU-second of the worker")
    return {"case": "jobs", "target": name, "round": nth, "msgs_per_cpu_s": figure}


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Start a Redis of our own, with the durability of the Redis Streams above."""
    port = free_port()
    (folder / "redis").mkdir()
    command = [
        "redis-server",
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--dir",
        str(folder / "redis"),
    ]
    command += [
        "--save",
        "",
        "--appendonly",
        "yes",
        "--appendfsync",
        "everysec",
        "--loglevel",
        "warning",
    ]
    with started(command) as process:
        wait_for(port, process)
        yield port


@contextmanager
def sluice_broker(folder: Path) -> Iterator[tuple[str, int]]:
    """Start a broker; yield its MQTT address and process id."""
    command = ["sluice", "serve", "--data", str(folder / "workers"), "--log-level", "warning"]
    command += ["--mqtt", "127.0.0.1:0", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with started(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        facts = dict(
            word.split("=", 1) for word in process.stdout.readline().split() if "=" in word
        )
        yield facts["mqtt"], process.pid


@contextmanager
def started(
    command: list[str], stdout: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=stdout, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[str], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{process.args} does not answer")


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a directory on the disk of the checkout: on a memory file system every sync would be
    free.

    SIGTERM cleans up like Ctrl-C.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="sluice-compare-", dir=ROOT) as folder:
            yield Path(folder)
    finally:
        signal.signal(signal.SIGTERM, before)


def run_plain(folder: Path, rounds: int, secs: float) -> list[dict[str, Any]]:
    """Compare plain topics with mosquitto by `sluice bench`, without the harness."""
    lines: list[dict[str, Any]] = []
    port = free_port()
    settings = (f"listener {port} 127.0.0.1", "allow_anonymous true", "log_dest none")
    unlimited = ("max_queued_messages 0", "max_inflight_messages 1000")
    (folder / "mosquitto.conf").write_text("\n".join([*settings, *unlimited, ""]))
    with (
        started(["mosquitto", "-c", str(folder / "mosquitto.conf")]) as mosquitto,
        sluice_broker(folder) as (address, pid_of_sluice),
    ):
        wait_for(port, mosquitto)
        places = {
            "sluice": (address, pid_of_sluice),
            "mosquitto": (f"127.0.0.1:{port}", mosquitto.pid),
        }
        for nth in range(rounds):
            for target, (where, pid) in places.items():
                command = [
                    "sluice",
                    "bench",
                    "pubsub",
                    "fan-out",
                    "--json",
                    "--url",
                    f"mqtt://{where}",
                ]
                command += ["--pid", str(pid), "--payload", "100", "--seconds", str(secs)]
                done = subprocess.run(command, capture_output=True, text=True)
                for row in json.loads(done.stdout or '{"results": []}')["results"]:
                    case = {"pubsub": "ps1_4x4", "fan-out": "fan_100"}[row["scenario"]]
                    figure = row["per_cpu_second"]
                    say(f"  {case}, {target}: {figure:,.0f} messages per CPU-second")
                    lines.append(
                        {"case": case, "target": target, "round": nth, "msgs_per_cpu_s": figure}
                    )
    return lines
