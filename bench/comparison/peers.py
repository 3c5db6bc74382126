"""The peers of the comparison: which are installed, their versions, and what their acknowledgements
mean.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A target of the load harness.

    `promise`: what its acknowledgement of a queue's message means; empty: it is measured on plain
    topics alone.
    """

    target: str
    name: str
    program: str
    get: str
    promise: str = ""


PEERS = (
    Peer("mosquitto", "mosquitto", "mosquitto", "apt install mosquitto", "in memory"),
    Peer(
        "redis-everysec",
        "Redis Streams, everysec",
        "redis-server",
        "apt install redis-server",
        "in memory; synced within 2 s",
    ),
    Peer(
        "redis-always",
        "Redis Streams, always",
        "redis-server",
        "apt install redis-server",
        "after fdatasync",
    ),
    Peer(
        "nats-js",
        "NATS JetStream",
        "nats-server",
        "apt install nats-server",
        "in the page cache; synced within 2 min",
    ),
    Peer("nats-mqtt", "NATS, MQTT", "nats-server", "apt install nats-server"),
    Peer(
        "rabbitmq-quorum",
        "RabbitMQ, quorum queue",
        "rabbitmq-server",
        "apt install rabbitmq-server",
        "after fdatasync",
    ),
    Peer("rabbitmq-mqtt", "RabbitMQ, MQTT", "rabbitmq-server", "apt install rabbitmq-server"),
)
SLUICE = Peer("sluice", "Sluice", "sluice", "", 'after fdatasync (`durability = "sync"`)')
NAMES = {peer.target: peer.name for peer in (SLUICE, *PEERS)}

# Job queues for Python: module, name, jobs per round (slow ones would take minutes), package.
LIBRARIES = (
    ("dramatiq", "Dramatiq", 3000, "dramatiq[redis]"),
    ("huey", "Huey", 3000, "huey"),
    ("celery", "Celery", 2000, "celery"),
    ("rq", "RQ", 400, "rq"),
)


def split(peers: tuple[Peer, ...] = PEERS) -> tuple[list[Peer], list[str]]:
    """Return the installed peers, and a line for each program that is missing."""
    here = [peer for peer in peers if shutil.which(peer.program)]
    missing = {peer.program: peer.get for peer in peers if peer not in here}
    return here, [
        f"{program} is not installed, and left out: `{get}`" for program, get in missing.items()
    ]


def peers_python(root: Path) -> str:
    """Return the Python that has the job queues: .venv-peers, or this one."""
    own = root / ".venv-peers/bin/python"
    return str(own) if own.exists() else sys.executable


def split_libraries(python: str) -> tuple[list[tuple[str, str, int]], list[str], dict[str, str]]:
    """Return libraries that can be imported there, a line for each that cannot, and versions by
    name.
    """
    code = (
        "import importlib.metadata as m, importlib.util as u, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print(name, m.version(name) if u.find_spec(name) else '-')"
    )
    names = [module for module, *_ in LIBRARIES]
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    found = dict(line.split() for line in done.stdout.splitlines())
    here = [(module, name, jobs) for module, name, jobs, _ in LIBRARIES if found[module] != "-"]
    missing = [
        f"{name} is not installed, and left out: `pip install '{package}'`"
        for module, name, _, package in LIBRARIES
        if found[module] == "-"
    ]
    return here, missing, {name: found[module] for module, name, _ in here}


def version_of(program: str) -> str:
    if program == "rabbitmq-server":  # its version command would start an Erlang VM
        found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
        return found[-1].name.partition("-")[2] if found else ""
    option = {"mosquitto": "-h"}.get(program, "--version")
    done = subprocess.run([program, option], capture_output=True, text=True)
    number = re.search(r"v?(\d+\.\d+\.\d+)", done.stdout + done.stderr)
    return number[1] if number else ""
