"""Who may import whom. The arrows between the rooms never turn round, and this keeps them true.

An import counts wherever it stands: inside a function or under TYPE_CHECKING it is knowledge all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

# Everybody may stand on the floor; "" is the package itself, which has only the version.
SHARED_MODULES = frozenset({"", "message", "errors", "clock", "metrics", "units"})

# What a room may know besides itself and the floor. A name stands for all below it.
ALLOWED_IMPORTS: dict[str, frozenset[str]] = {
    "wire": frozenset(),
    "store": frozenset(),
    "process": frozenset(),
    "config_types": frozenset(),
    "json_schema": frozenset(),
    "markup": frozenset(),
    "queues": frozenset({"store.protocol", "store.changes", "config_types"}),
    "alerts": frozenset({"queues"}),
    "client": frozenset({"wire"}),
    "worker": frozenset({"client"}),
    "spark": frozenset({"client", "markup"}),
    "bench": frozenset({"client", "wire", "markup"}),
    "broker": frozenset({"wire", "queues"}),
    "cluster": frozenset({"broker", "queues", "store", "wire", "config_types"}),
    "access": frozenset({"broker", "wire", "config_types"}),
    "bulk": frozenset({"queues", "store"}),
    "admin": frozenset({"access", "broker", "queues", "cluster", "bulk", "process"}),
    "testing": frozenset({"broker", "client", "queues", "json_schema", "store", "wire", "worker"}),
    "pytest_plugin": frozenset({"testing"}),
}

# These put the rooms together and may know them all.
COMPOSITION_MODULES = frozenset({"app", "broker_core", "cluster_app", "cli", "config", "__main__"})


def modules_below(sources: Path) -> dict[str, Path]:
    """Every module of the package by its name below `sluice`: "wire.decode", "wire" for wire/__init__.py."""
    names = {}
    for path in sorted((sources / "sluice").rglob("*.py")):
        parts = path.relative_to(sources / "sluice").with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of Sluice that one module imports, by their names below `sluice`."""
    package = (
        ["sluice", *name.split(".")]
        if path.name == "__init__.py"
        else ["sluice", *name.split(".")[:-1]]
    )
    package = [part for part in package if part]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from sluice.store import protocol` names a module, `from sluice.errors import SluiceError` does not
            found = [
                full
                if (full := f"{base}.{alias.name}").removeprefix("sluice.") in modules
                else base
                for alias in node.names
            ]
        for full in found:
            if full == "sluice" or full.startswith("sluice."):
                yield full.removeprefix("sluice").removeprefix(".")


def may_import(importer: str, imported: str) -> bool:
    room, other = importer.partition(".")[0], imported.partition(".")[0]
    if room in COMPOSITION_MODULES or other in SHARED_MODULES:
        return room not in SHARED_MODULES or other in ("", "errors")
    if room == other:
        return True
    return any(
        imported == door or imported.startswith(f"{door}.")
        for door in ALLOWED_IMPORTS.get(room, ())
    )


def forbidden_imports(sources: Path) -> list[str]:
    modules = modules_below(sources)
    rooms = {name.partition(".")[0] for name in modules}
    strangers = rooms - ALLOWED_IMPORTS.keys() - COMPOSITION_MODULES - SHARED_MODULES
    faults = [f"{room} is a room without arrows; draw them in ARROWS" for room in sorted(strangers)]
    for name, path in modules.items():
        faults += [
            f"{name or 'sluice'} must not know {known}"
            for known in sorted(set(imports_of(name, path, modules)))
            if not may_import(name, known)
        ]
    return faults


def test_no_package_imports_a_forbidden_one() -> None:
    assert forbidden_imports(SOURCES) == []


def build_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "sluice" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GOOD_TREE = {
    "__init__.py": "__version__ = '1'",
    "errors.py": "import os",
    "message.py": "from sluice.errors import SluiceError",
    "app.py": "from sluice import broker, store\nfrom sluice.admin import service",
    "wire/__init__.py": "",
    "wire/decode.py": "from sluice.errors import SluiceError\nfrom . import topics\nfrom .topics import check",
    "wire/topics.py": "import sluice.message\nfrom sluice import __version__",
    "broker/__init__.py": "",
    "broker/session.py": "from sluice.wire import decode\nfrom sluice.queues.engine import Engine",
    "queues/engine.py": "from sluice.store import protocol\nfrom sluice.store.protocol import Store",
    "store/__init__.py": "",
    "store/protocol.py": "",
    "admin/service.py": "import sluice.queues.engine",
    "client/__init__.py": "from sluice.wire.decode import feed",
    "spark/source.py": "from sluice.client import connect",
}


def test_valid_tree_passes(tmp_path: Path) -> None:
    assert forbidden_imports(build_tree(tmp_path, GOOD_TREE)) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "wire/decode.py",
            "from sluice.broker.session import Session",
            "wire.decode must not know broker.session",
        ),
        ("wire/decode.py", "import sluice.broker", "wire.decode must not know broker"),
        ("wire/decode.py", "from sluice import broker", "wire.decode must not know broker"),
        (
            "wire/decode.py",
            "from ..broker import session",
            "wire.decode must not know broker.session",
        ),
        ("wire/__init__.py", "from ..broker import session", "wire must not know broker.session"),
        (
            "wire/decode.py",
            "def late() -> None:\n    import sluice.app",
            "wire.decode must not know app",
        ),
        (
            "queues/engine.py",
            "from sluice.store import memory",
            "queues.engine must not know store",
        ),
        (
            "store/memory.py",
            "from sluice.queues import engine",
            "store.memory must not know queues.engine",
        ),
        ("broker/session.py", "import sluice.config", "broker.session must not know config"),
        (
            "client/__init__.py",
            "import sluice.broker.session",
            "client must not know broker.session",
        ),
        ("message.py", "from sluice.wire import decode", "message must not know wire.decode"),
        ("message.py", "from sluice import metrics", "message must not know metrics"),
        ("__init__.py", "from sluice.app import serve", "sluice must not know app"),
        ("utils/odds.py", "", "utils is a room without arrows; draw them in ARROWS"),
    ],
)
def test_forbidden_import_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    tree = build_tree(tmp_path, {"metrics.py": "", "config.py": "", **GOOD_TREE, name: text})
    assert forbidden_imports(tree) == [fault]
