"""Selects the modules that mypyc compiles to native code when Sluice is installed.

Everything else about the package is in pyproject.toml. The same sources run interpreted, slower but
with the same behavior: `SLUICE_PURE=1 pip install .` compiles nothing. `SLUICE_OPT_LEVEL` is gcc's
-O level, by default 3.

mypyc writes one C file for each module. They are compiled in chunks, one for each package of the
message path, on all cores. A chunk is compiled again only if its C code or a header has changed.
"""

from __future__ import annotations

import gc
import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Below src/sluice: the packages on the message path, compiled as a whole, and single modules of
# other packages.
COMPILED_PACKAGES = (
    "wire",
    "broker",
    "queues",
    "store/embedded",
    "cluster/plain",
    "cluster/remote_queues",
)
COMPILED_MODULES = (
    "message.py",
    "clock.py",
    "metrics.py",
    "placement.py",
    "bench/tally.py",
    "bench/traffic.py",
    "bulk/column_builders.py",
    "bulk/merge.py",
    "cluster/cell.py",
    "cluster/client_ingress.py",
    "cluster/node.py",
    "cluster/membership/placement.py",
    "cluster/transport/link_connection.py",
    "cluster/transport/mux.py",
    "cluster/transport/stream_acceptor.py",
    "store/changes.py",
    "store/log_position.py",
    "store/memory.py",
    "store/protocol.py",
    "store/snapshot_policy.py",
    "store/redis/keys.py",
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
    "broker/acl/client_pattern.py",
    "broker/acl/access.py",
    "broker/net/listener.py",
    "broker/net/origins.py",
    "broker/net/websocket.py",
    "queues/service/partition_strategies.py",
    "queues/service/queue_config.py",
    "queues/service/views.py",
}

PACKAGE = Path("src/sluice")
BUILD = Path("build")

# The C files of a chunk form one translation unit, in which gcc inlines calls between modules: a
# larger chunk is faster code and a longer compilation. The values are prefixes of module names;
# modules that no prefix matches, and the runtime of mypyc, are the last chunk.
CHUNKS = {
    "queues": ("sluice.queues.", "sluice.message", "sluice.placement"),
    "broker": ("sluice.broker.", "sluice.wire."),
    "cluster": ("sluice.cluster.",),
    "store": ("sluice.store.",),
    "rest": ("",),
}

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

    say(f"translating {len(modules)} modules to C")
    gc.disable()  # the trees of all modules live until the end; searching them takes a fifth longer
    extensions = mypycify(
        modules,
        opt_level=os.environ.get("SLUICE_OPT_LEVEL", "3"),
        # Line numbers of generated C are useless and take longer to compile than the code.
        debug_level="0",
        multi_file=True,
        group_name="sluice",
    )
    gc.enable()
    for extension in extensions:
        extension.extra_compile_args += VISIBILITY_FLAGS + NO_WARNING_FLAGS
        if len(extension.sources) > 1:
            extension.sources = write_chunks(extension.sources)
    return extensions


def write_chunks(sources: list[str]) -> list[str]:
    """Write one C file for each chunk, which includes its sources; return the files."""
    members: dict[str, list[str]] = {name: [] for name in CHUNKS}
    for source in sources:
        module = Path(source).stem.removeprefix("__native_").replace("___", ".")
        members[next(name for name in CHUNKS if module.startswith(CHUNKS[name]))].append(source)
    chunks = []
    for name, included in members.items():
        chunk = BUILD / f"chunk_{name}.c"
        chunk.write_text("".join(f'#include "{Path(source).name}"\n' for source in included))
        chunks.append(str(chunk))
    return chunks


class IncrementalBuild(build_ext):
    """Compile on all cores, and only what has changed since the last build."""

    def build_extensions(self) -> None:
        cores = os.cpu_count() or 1
        self._slots = threading.Semaphore(cores)
        self._pool = ThreadPoolExecutor(cores)
        # One thread waits for the chunks of the library while others compile the loaders of the
        # modules; the semaphore limits the compilers of all of them.
        self.parallel = cores + 1
        self._compile_one: Callable[..., None] = self.compiler._compile
        self.compiler.compile = self._compile_all
        with self._pool:
            super().build_extensions()

    def _compile_all(
        self,
        sources: list[str],
        output_dir: str | None = None,
        macros: Any = None,
        include_dirs: Any = None,
        debug: bool = False,
        extra_preargs: Any = None,
        extra_postargs: Any = None,
        depends: Any = None,
    ) -> list[str]:
        """Compile the sources of one extension; return its objects. Replaces `compiler.compile`."""
        compiler: Any = self.compiler
        macros, objects, extra_postargs, pp_opts, build = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)

        def compile_object(target: str) -> None:
            source, extension = build[target]
            with self._slots:
                inputs = fingerprint(source, [*compiler.compiler_so, *cc_args, *extra_postargs])
                stamp = Path(f"{target}.inputs")
                if Path(target).exists() and stamp.exists() and stamp.read_text() == inputs:
                    return
                if len(sources) > 1:
                    say(f"compiling {source}")
                self._compile_one(target, source, extension, cc_args, extra_postargs, pp_opts)
                stamp.write_text(inputs)

        if len(objects) > 1:
            list(self._pool.map(compile_object, objects))
        else:
            compile_object(objects[0])
        return objects


def fingerprint(source: str, command: list[str]) -> str:
    """Return a hash of the command, the C file, the files it includes and all generated headers."""
    digest = hashlib.sha256(" ".join(command).encode())
    text = Path(source).read_text()
    digest.update(text.encode())
    names = re.findall(r'^#include "(.+)"$', text, re.MULTILINE)
    included = [BUILD / name for name in names if (BUILD / name).exists()]
    for path in [*included, *sorted(BUILD.glob("*.h"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def say(text: str) -> None:
    print(f"sluice: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    setup(ext_modules=native_extensions(), cmdclass={"build_ext": IncrementalBuild})
