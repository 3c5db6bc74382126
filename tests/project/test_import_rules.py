"""Checks which packages import which: dependencies between packages point one way.

Every import counts, also inside a function or under TYPE_CHECKING: each of them is a dependency.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

# Every module may import these; "" is the package `sluice` itself, which has only the version.
SHARED_MODULES = frozenset({"", "backoff", "message", "errors", "clock", "metrics", "units"})

# The packages and modules that each top-level package may import, besides itself and the shared
# modules. A name includes everything below it.
ALLOWED_IMPORTS: dict[str, frozenset[str]] = {
    "wire": frozenset(),
    "store": frozenset(),
    "process": frozenset(),
    "config_types": frozenset(),
    "json_schema": frozenset(),
    "http_client": frozenset(),
    "report": frozenset(),
    "queues": frozenset({"store.protocol", "store.changes", "config_types"}),
    "alerts": frozenset({"queues"}),
    "client": frozenset({"wire"}),
    "worker": frozenset({"client"}),
    "spark": frozenset({"client", "http_client", "report"}),
    "bench": frozenset({"client", "wire", "report"}),
    "broker": frozenset({"wire", "queues"}),
    "cluster": frozenset({"broker", "queues", "store", "wire", "config_types"}),
    "access": frozenset({"broker", "wire", "config_types"}),
    "bulk": frozenset({"queues", "store"}),
    "admin": frozenset({"access", "broker", "queues", "cluster", "bulk", "process"}),
    "testing": frozenset({"broker", "client", "queues", "json_schema", "store", "wire", "worker"}),
    "pytest_plugin": frozenset({"testing"}),
}

# These modules compose the packages and may import all of them.
COMPOSITION_MODULES = frozenset({"app", "broker_core", "cluster_app", "cli", "config", "__main__"})

# The sibling sub-packages that each sub-package may import. The modules directly in their common
# package are always allowed. The sub-packages of `queues`, and `acl`, `namespaces` and `sessions`
# of `broker`, still depend on each other; their rows keep new dependencies out.
ALLOWED_SIBLINGS: dict[str, frozenset[str]] = {
    "admin.bulk": frozenset({"queries"}),
    "admin.forwarding": frozenset({"bulk", "grpc", "metrics", "rest"}),
    "admin.grpc": frozenset({"forwarding"}),
    "admin.metrics": frozenset(),
    "admin.queries": frozenset(),
    "admin.rest": frozenset({"bulk", "forwarding", "metrics"}),
    "broker.acl": frozenset({"namespaces", "net", "sessions"}),
    "broker.namespaces": frozenset({"acl", "net", "sessions"}),
    "broker.net": frozenset({"sessions"}),
    "broker.sessions": frozenset({"acl", "namespaces", "net"}),
    "cli.commands": frozenset({"support"}),
    "cli.pipelines": frozenset({"support"}),
    "cli.support": frozenset(),
    "client.net": frozenset({"protocol"}),
    "client.protocol": frozenset(),
    "client.queues": frozenset({"net", "protocol"}),
    "client.topics": frozenset({"queues"}),
    "cluster.etcd": frozenset({"membership"}),
    "cluster.ingress": frozenset({"membership", "transport"}),
    "cluster.membership": frozenset({"transport"}),
    "cluster.plain": frozenset({"transport"}),
    "cluster.remote_queues": frozenset({"ingress", "membership", "plain", "transport"}),
    "cluster.transport": frozenset({"membership"}),
    "queues.bodies": frozenset({"log", "model"}),
    "queues.bulk": frozenset({"compacted", "flow", "log", "model"}),
    "queues.compacted": frozenset({"bodies", "flow", "log", "model"}),
    "queues.flow": frozenset({"bodies", "bulk", "compacted", "log", "model"}),
    "queues.log": frozenset({"bulk", "compacted", "flow", "model"}),
    "queues.model": frozenset({"bulk", "compacted", "flow", "log"}),
    "spark.http": frozenset(),
    "spark.pipelines": frozenset({"http", "source"}),
    "spark.runtime": frozenset(),
    "spark.source": frozenset({"http", "runtime"}),
    "store.embedded": frozenset(),
    "store.redis": frozenset({"embedded"}),
}


def modules_below(sources: Path) -> dict[str, Path]:
    """Return the path of every module by its name below `sluice`.

    The name of wire/decode.py is "wire.decode", that of wire/__init__.py is "wire".
    """
    names = {}
    for path in sorted((sources / "sluice").rglob("*.py")):
        parts = path.relative_to(sources / "sluice").with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of Sluice that one module imports, by their names below `sluice`."""
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
            # `from sluice.store import protocol` imports a module,
            # `from sluice.errors import SluiceError` does not.
            found = [
                full
                if (full := f"{base}.{alias.name}").removeprefix("sluice.") in modules
                else base
                for alias in node.names
            ]
        for full in found:
            if full == "sluice" or full.startswith("sluice."):
                yield full.removeprefix("sluice").removeprefix(".")


def subpackages_of(modules: dict[str, Path]) -> set[str]:
    """Return all sub-packages: "store.embedded" if a module "store.embedded.files" exists."""
    return {".".join(name.split(".")[:2]) for name in modules if name.count(".") >= 2}


def may_import(importer: str, imported: str) -> bool:
    """Return whether the rules for top-level packages allow an import."""
    package, other = importer.partition(".")[0], imported.partition(".")[0]
    if package in COMPOSITION_MODULES or other in SHARED_MODULES:
        return package not in SHARED_MODULES or other in ("", "errors")
    if package == other:
        return True
    return any(
        imported == allowed or imported.startswith(f"{allowed}.")
        for allowed in ALLOWED_IMPORTS.get(package, ())
    )


def may_import_sibling(importer: str, imported: str, subpackages: set[str]) -> bool:
    """Return whether the rules for the sub-packages of one package allow an import."""
    subpackage = ".".join(importer.split(".")[:2])
    other = ".".join(imported.split(".")[:2])
    same_package = subpackage.partition(".")[0] == other.partition(".")[0]
    if subpackage == other or not same_package or not {subpackage, other} <= subpackages:
        return True
    return other.partition(".")[2] in ALLOWED_SIBLINGS.get(subpackage, ())


def forbidden_imports(sources: Path) -> list[str]:
    modules = modules_below(sources)
    subpackages = subpackages_of(modules)
    packages = {name.partition(".")[0] for name in modules}
    unlisted = packages - ALLOWED_IMPORTS.keys() - COMPOSITION_MODULES - SHARED_MODULES
    faults = [f"{name} has no rule; add it to ALLOWED_IMPORTS" for name in sorted(unlisted)]
    faults += [
        f"{name} has no rule; add it to ALLOWED_SIBLINGS"
        for name in sorted(subpackages - ALLOWED_SIBLINGS.keys())
    ]
    for name, path in modules.items():
        faults += [
            f"{name or 'sluice'} must not import {imported}"
            for imported in sorted(set(imports_of(name, path, modules)))
            if not may_import(name, imported) or not may_import_sibling(name, imported, subpackages)
        ]
    return faults


def test_no_package_imports_a_forbidden_one() -> None:
    assert forbidden_imports(SOURCES) == []


def test_every_rule_names_existing_packages() -> None:
    modules = modules_below(SOURCES)
    named = ALLOWED_IMPORTS.keys() | COMPOSITION_MODULES | SHARED_MODULES
    named |= set().union(*ALLOWED_IMPORTS.values())
    assert named - modules.keys() == set()
    assert ALLOWED_SIBLINGS.keys() == subpackages_of(modules)


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
    "wire/decode.py": (
        "from sluice.errors import SluiceError\nfrom . import topics\nfrom .topics import check"
    ),
    "wire/topics.py": "import sluice.message\nfrom sluice import __version__",
    "broker/__init__.py": "",
    "broker/session.py": "from sluice.wire import decode\nfrom sluice.queues.engine import Engine",
    "queues/engine.py": "from sluice.store import protocol\nimport sluice.store.protocol",
    "store/__init__.py": "",
    "store/protocol.py": "",
    "admin/service.py": "import sluice.queues.engine",
    "client/__init__.py": "from sluice.wire.decode import feed",
    "spark/source.py": "from sluice.client import connect",
    "cluster/cells.py": "from sluice.cluster.plain.interest import Interest",
    "cluster/plain/interest.py": "from sluice.cluster.transport import mux",
    "cluster/transport/mux.py": "from sluice.cluster.cells import Cells",
}


def test_valid_tree_passes(tmp_path: Path) -> None:
    assert forbidden_imports(build_tree(tmp_path, GOOD_TREE)) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "wire/decode.py",
            "from sluice.broker.session import Session",
            "wire.decode must not import broker.session",
        ),
        ("wire/decode.py", "import sluice.broker", "wire.decode must not import broker"),
        ("wire/decode.py", "from sluice import broker", "wire.decode must not import broker"),
        (
            "wire/decode.py",
            "from ..broker import session",
            "wire.decode must not import broker.session",
        ),
        ("wire/__init__.py", "from ..broker import session", "wire must not import broker.session"),
        (
            "wire/decode.py",
            "def late() -> None:\n    import sluice.app",
            "wire.decode must not import app",
        ),
        (
            "queues/engine.py",
            "from sluice.store import memory",
            "queues.engine must not import store",
        ),
        (
            "store/memory.py",
            "from sluice.queues import engine",
            "store.memory must not import queues.engine",
        ),
        ("broker/session.py", "import sluice.config", "broker.session must not import config"),
        (
            "client/__init__.py",
            "import sluice.broker.session",
            "client must not import broker.session",
        ),
        ("message.py", "from sluice.wire import decode", "message must not import wire.decode"),
        ("message.py", "from sluice import metrics", "message must not import metrics"),
        ("__init__.py", "from sluice.app import serve", "sluice must not import app"),
        (
            "cluster/transport/mux.py",
            "from sluice.cluster.plain import interest",
            "cluster.transport.mux must not import cluster.plain.interest",
        ),
        (
            "cluster/extras/odds.py",
            "",
            "cluster.extras has no rule; add it to ALLOWED_SIBLINGS",
        ),
        ("utils/odds.py", "", "utils has no rule; add it to ALLOWED_IMPORTS"),
    ],
)
def test_forbidden_import_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    tree = build_tree(tmp_path, {"metrics.py": "", "config.py": "", **GOOD_TREE, name: text})
    assert forbidden_imports(tree) == [fault]
