"""Selects the modules that mypyc compiles to native code when Sluice is installed.

Everything else about the package is in pyproject.toml. The same sources run interpreted, slower but
with the same behavior: `SLUICE_PURE=1 pip install .` compiles nothing. `SLUICE_OPT_LEVEL` is gcc's
-O level, by default 3.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

# Below src/sluice: the packages on the message path, compiled as a whole, and single modules of
# other packages.
COMPILED_PACKAGES = (
    "wire",
    "broker",
    "queues",
    "store/embedded",
    "cluster/ingress",
    "cluster/plain",
    "cluster/remote_queues",
)
COMPILED_MODULES = (
    "message.py",
    "clock.py",
    "metrics.py",
    "bench/tally.py",
    "bench/traffic.py",
    "bulk/column_builders.py",
    "bulk/merge.py",
    "cluster/cell.py",
    "cluster/node.py",
    "cluster/membership/placement.py",
    "cluster/transport/local_stream.py",
    "cluster/transport/mux.py",
    "store/changes.py",
    "store/memory.py",
    "store/protocol.py",
    "store/snapshot_policy.py",
    "store/redis/keys.py",
    "store/redis/partition_keys.py",
    "store/redis/log/address_index.py",
    "store/redis/log/log_entries.py",
    "store/redis/log/plan_builder.py",
    "store/redis/log/stream_reads.py",
    "store/redis/log/write_plan.py",
    "store/redis/views/group_views.py",
)

# Modules of compiled packages that run at most once per connection, use untyped libraries, or are
# read by reflection.
NOT_COMPILED = {
    "broker/acl/access.py",
    "broker/net/listener.py",
    "broker/net/origins.py",
    "broker/net/websocket.py",
    "queues/config.py",
    "queues/views.py",
}

PACKAGE = Path("src/sluice")

# Functions of the library are called from inside it only. Without these flags each call goes
# through a table for symbol interposition, and none is inlined.
VISIBILITY_FLAGS = ["-fvisibility=hidden", "-fno-semantic-interposition"]
# Warnings about generated C are useless. Python's own flags enable all of them, and the compiler
# computes them even with `-w`: 175 of 230 seconds at -O1. So they are disabled first.
NO_WARNING_FLAGS = ["-Wno-all", "-w"]


def compiled_modules() -> list[str]:
    """Return the files to compile, sorted: their order is part of the generated C."""
    found = {PACKAGE / module for module in COMPILED_MODULES}
    for package in COMPILED_PACKAGES:
        found.update(
            path for path in (PACKAGE / package).rglob("*.py") if path.name != "__init__.py"
        )
    return sorted(str(path) for path in found - {PACKAGE / module for module in NOT_COMPILED})


def native_extensions() -> list[Extension]:
    """Return one shared library for all modules, so that calls between them are direct in C."""
    modules = compiled_modules()
    if os.environ.get("SLUICE_PURE") == "1" or not modules:
        return []
    from mypyc.build import mypycify  # a pure build does not need it

    extensions = mypycify(
        modules,
        opt_level=os.environ.get("SLUICE_OPT_LEVEL", "3"),
        # Line numbers of generated C are useless and take longer to compile than the code.
        debug_level="0",
        group_name="sluice",
    )
    for extension in extensions:
        extension.extra_compile_args += VISIBILITY_FLAGS + NO_WARNING_FLAGS
    return extensions


if __name__ == "__main__":
    setup(ext_modules=native_extensions())
