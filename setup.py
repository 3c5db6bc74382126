"""The compiled half of the build: which modules mypyc turns into native code when Sluice is installed.

Everything else about the package stands in pyproject.toml. The same sources run interpreted, slower and otherwise
alike: `SLUICE_PURE=1 pip install .` compiles nothing. `SLUICE_OPT_LEVEL` is gcc's -O level, 3 unless given.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

# The hot rooms, by pattern below src/sluice; a pattern without a match is a room that is not built yet.
COMPILED = (
    "message.py",
    "clock.py",
    "metrics.py",
    "wire/*.py",
    "broker/*.py",
    "queues/*.py",
    "store/*.py",
    "store/embedded/*.py",
    "store/redis/frames.py",
    "store/redis/index.py",
    "store/redis/bodies.py",
    "store/redis/composing.py",
    "store/redis/places.py",
    "store/redis/keys.py",
    "store/redis/plan.py",
    "store/redis/views.py",
    "bulk/columns.py",
    "bulk/merging.py",
    "cluster/bridge.py",
    "cluster/cell.py",
    "cluster/frames.py",
    "cluster/front.py",
    "cluster/guest.py",
    "cluster/holding.py",
    "cluster/interest.py",
    "cluster/leg.py",
    "cluster/legs.py",
    "cluster/local_line.py",
    "cluster/node.py",
    "cluster/placement.py",
    "cluster/said.py",
    "cluster/searching.py",
    "cluster/spread.py",
    "cluster/taken.py",
    "cluster/trunk.py",
    "cluster/where.py",
    "bench/tally.py",
    "bench/traffic.py",
)

# Modules of those rooms that run once per connection or less, or lean on libraries that carry no types.
NOT_COMPILED = {"__init__.py", "access.py", "config.py", "listener.py", "origins.py", "websocket.py"}

PACKAGE = Path("src/sluice")

# Functions of the library are called from inside it only: without this, each call goes through a table that the
# loader could bend elsewhere, and none is inlined.
INWARD = ["-fvisibility=hidden", "-fno-semantic-interposition"]
# Warnings about generated C are for nobody. Python's own flags ask for all of them, and the compiler looks for them
# also when it is not to tell (`-w`): 175 of 230 seconds at -O1. So they are taken back first.
UNWARNED = ["-Wno-all", "-w"]


def compiled_modules() -> list[str]:
    """The files to compile, sorted: the order of modules is part of the generated C, and of whether it changed."""
    found = {path for pattern in COMPILED for path in PACKAGE.glob(pattern)}
    return sorted(str(path) for path in found if path.name not in NOT_COMPILED)


def native_extensions() -> list[Extension]:
    """One shared library for all modules: calls between them become direct calls in C."""
    modules = compiled_modules()
    if os.environ.get("SLUICE_PURE") == "1" or not modules:
        return []
    from mypyc.build import mypycify  # not needed, and perhaps not installed, for a pure build

    extensions = mypycify(
        modules,
        opt_level=os.environ.get("SLUICE_OPT_LEVEL", "3"),
        debug_level="0",  # lines of generated C help nobody, and take the compiler more time than the code itself
        group_name="sluice",
    )
    for extension in extensions:
        extension.extra_compile_args += INWARD + UNWARNED
    return extensions


if __name__ == "__main__":
    setup(ext_modules=native_extensions())
