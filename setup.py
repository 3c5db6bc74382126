"""Which modules mypyc compiles to native code when Sluice is installed.

Everything else about the package is in pyproject.toml. The same sources run interpreted, slower and otherwise
alike: `SLUICE_PURE=1 pip install .` compiles nothing. `SLUICE_OPT_LEVEL` is gcc's -O level, 3 unless given.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

# The packages on the path of a message, compiled whole, and single modules of other packages; below src/sluice.
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

# Modules of the compiled packages that run once per connection or less, or use libraries without types.
NOT_COMPILED = {
    "broker/acl/access.py",
    "broker/net/listener.py",
    "broker/net/origins.py",
    "broker/net/websocket.py",
    "queues/config.py",
}

PACKAGE = Path("src/sluice")

# Functions of the library are called from inside it only: without this, each call goes through a table that the
# loader could bend elsewhere, and none is inlined.
INWARD = ["-fvisibility=hidden", "-fno-semantic-interposition"]
# Warnings about generated C are for nobody. Python's own flags ask for all of them, and the compiler looks for them
# also when it is not to tell (`-w`): 175 of 230 seconds at -O1. So they are taken back first.
UNWARNED = ["-Wno-all", "-w"]


def compiled_modules() -> list[str]:
    """Return the files to compile, sorted: their order is part of the generated C, and of whether it changed."""
    found = {PACKAGE / module for module in COMPILED_MODULES}
    for package in COMPILED_PACKAGES:
        found.update(
            path for path in (PACKAGE / package).rglob("*.py") if path.name != "__init__.py"
        )
    return sorted(str(path) for path in found - {PACKAGE / module for module in NOT_COMPILED})


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
