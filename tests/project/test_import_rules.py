"""Checks which modules import which: dependencies point one way, and go through interfaces.

Every import counts, also inside a function or under TYPE_CHECKING: each of them is a dependency.
Three rules: a package imports only the packages listed for it; modules of one package that import
each other in a circle are few; and a sub-package is imported by its interface, its `__init__`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

# Every module may import these; "" is the package `sluice` itself, which has only the version.
SHARED_MODULES = frozenset(
    {"", "backoff", "message", "errors", "clock", "metrics", "placement", "units"}
)

# The packages and modules that each top-level package may import, besides itself and the shared
# modules. A name includes everything below it.
ALLOWED_IMPORTS: dict[str, frozenset[str]] = {
    "wire": frozenset(),
    "store": frozenset(),
    "process": frozenset(),
    "json_schema": frozenset(),
    "http_client": frozenset(),
    "report": frozenset(),
    "queues": frozenset({"store.protocol", "store.changes", "config.setting_types"}),
    "alerts": frozenset({"queues"}),
    "client": frozenset({"wire"}),
    "worker": frozenset({"client"}),
    "spark": frozenset({"client", "http_client", "report"}),
    "bench": frozenset({"client", "wire", "report"}),
    "broker": frozenset({"wire", "queues"}),
    "cluster": frozenset({"broker", "queues", "store", "wire", "config.setting_types"}),
    "access": frozenset({"broker", "wire", "config.setting_types"}),
    "bulk": frozenset({"queues", "store"}),
    "admin": frozenset({"access", "broker", "queues", "cluster", "bulk", "process"}),
    "testing": frozenset(
        {"broker", "broker_core", "client", "queues", "json_schema", "store", "wire", "worker"}
    ),
    "pytest_plugin": frozenset({"testing"}),
}

# These modules compose the packages and may import all of them.
COMPOSITION_MODULES = frozenset(
    {
        "app",
        "broker_core",
        "broker_host",
        "cluster_app",
        "cli",
        "config",
        "processes",
        "store_opener",
        "__main__",
    }
)

# The sibling sub-packages that each sub-package may import. The modules directly in their common
# package are always allowed. A row lists what is used and nothing else, and the rows of a package
# form layers.
ALLOWED_SIBLINGS: dict[str, frozenset[str]] = {
    "admin.bulk": frozenset(),
    "admin.forwarding": frozenset({"bulk", "metrics"}),
    "admin.grpc": frozenset({"forwarding", "queries"}),
    "admin.metrics": frozenset(),
    "admin.queries": frozenset(),
    "admin.rest": frozenset({"bulk", "forwarding", "metrics", "queries"}),
    "broker.acl": frozenset(),
    "broker.namespaces": frozenset({"acl", "routing", "sessions"}),
    "broker.net": frozenset({"acl", "routing", "sessions"}),
    "broker.routing": frozenset({"acl", "sessions"}),
    "broker.sessions": frozenset({"acl"}),
    "cli.commands": frozenset({"support"}),
    "cli.pipelines": frozenset({"support"}),
    "cli.support": frozenset(),
    "client.net": frozenset({"protocol"}),
    "client.protocol": frozenset(),
    "client.queues": frozenset({"net", "protocol"}),
    "client.topics": frozenset({"queues"}),
    "cluster.etcd": frozenset({"membership"}),
    "cluster.membership": frozenset(),
    "cluster.plain": frozenset({"transport"}),
    "cluster.remote_queues": frozenset({"plain", "transport"}),
    "cluster.transport": frozenset({"membership"}),
    "queues.bodies": frozenset({"model"}),
    "queues.bulk": frozenset({"flow", "log", "model"}),
    "queues.commit_loop": frozenset({"compacted", "flow", "log", "model", "recovery"}),
    "queues.compacted": frozenset({"bodies", "log", "model"}),
    "queues.flow": frozenset({"bodies", "log", "model"}),
    "queues.log": frozenset(),
    "queues.model": frozenset({"log"}),
    "queues.recovery": frozenset({"bulk", "flow", "log", "model"}),
    "queues.schedules": frozenset({"flow", "log", "model"}),
    "queues.service": frozenset({"bulk", "flow", "log", "model", "schedules"}),
    "spark.http": frozenset(),
    "spark.pipelines": frozenset({"http", "source"}),
    "spark.runtime": frozenset(),
    "spark.source": frozenset({"http", "runtime"}),
    "store.embedded": frozenset(),
    "store.redis": frozenset(),
}

# Modules that import each other in a circle must be read together. At most this many may.
MAX_CYCLE_MODULES = 5

# Packages that exceed it, with the size of their largest circle. Lower the numbers, and delete a
# row when its package obeys; add none.
LARGEST_CYCLES: dict[str, int] = {}

# Sub-packages whose `__init__` is their interface: code outside of them imports names in its
# `__all__` and nothing behind it. Add the others; remove none.
INTERFACES: frozenset[str] = frozenset(
    {
        "admin.bulk",
        "admin.forwarding",
        "admin.grpc",
        "admin.metrics",
        "admin.queries",
        "admin.rest",
        "broker.acl",
        "broker.namespaces",
        "broker.net",
        "broker.routing",
        "broker.sessions",
        "cli.commands",
        "cli.pipelines",
        "cli.support",
        "client.net",
        "client.protocol",
        "client.queues",
        "client.topics",
        "cluster.etcd",
        "cluster.membership",
        "cluster.transport",
        "queues.bodies",
        "queues.bulk",
        "queues.commit_loop",
        "queues.compacted",
        "queues.flow",
        "queues.log",
        "queues.model",
        "queues.recovery",
        "queues.schedules",
        "queues.service",
        "spark.http",
        "spark.runtime",
        "store.embedded",
        "store.redis",
    }
)


# Modules that load a library which few brokers need: imported by name, where they are needed.
LOADED_ON_DEMAND: frozenset[str] = frozenset({"cluster.membership.redis_kv"})


def modules_below(sources: Path) -> dict[str, Path]:
    """Return the path of every module by its name below `sluice`.

    The name of wire/decode.py is "wire.decode", that of wire/__init__.py is "wire".
    """
    names = {}
    for path in sorted((sources / "sluice").rglob("*.py")):
        parts = path.relative_to(sources / "sluice").with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def import_statements(name: str, path: Path) -> list[tuple[str, str]]:
    """Return all imports of Sluice in one module, as pairs of a module and a name imported from it.

    The module has its name below `sluice`; the name is empty if the module itself is imported.
    """
    package = ["sluice", *name.split(".")] if name else ["sluice"]
    if path.name != "__init__.py":
        del package[-1]
    statements: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found = [(base, alias.name) for alias in node.names]
        else:
            continue
        statements += [
            (base.removeprefix("sluice").removeprefix("."), imported)
            for base, imported in found
            if base == "sluice" or base.startswith("sluice.")
        ]
    return statements


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of Sluice that one module imports, by their names below `sluice`."""
    for base, imported in import_statements(name, path):
        # `from sluice.store import protocol` imports a module,
        # `from sluice.errors import SluiceError` does not.
        full = f"{base}.{imported}".removeprefix(".")
        yield full if full in modules else base


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


def unused_siblings(sources: Path) -> list[str]:
    """Return the rules for sub-packages that no import needs."""
    modules = modules_below(sources)
    used = {
        (".".join(name.split(".")[:2]), ".".join(imported.split(".")[:2]))
        for name, path in modules.items()
        for imported in imports_of(name, path, modules)
    }
    return [
        f"{subpackage} does not import {sibling}: delete it in ALLOWED_SIBLINGS"
        for subpackage, siblings in ALLOWED_SIBLINGS.items()
        for sibling in sorted(siblings)
        if (subpackage, f"{subpackage.partition('.')[0]}.{sibling}") not in used
    ]


def sibling_cycles(allowed: dict[str, frozenset[str]]) -> list[list[str]]:
    """Return the circles that the rules for sub-packages permit."""
    return cycles(
        {
            subpackage: {f"{subpackage.partition('.')[0]}.{sibling}" for sibling in siblings}
            for subpackage, siblings in allowed.items()
        }
    )


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, the largest first."""
    reached: list[str] = []  # in the order in which the search leaves them
    seen: set[str] = set()
    for root in sorted(graph):
        trail = [(root, iter(sorted(graph[root])))] if root not in seen else []
        seen.add(root)
        while trail:
            module, imports = trail[-1]
            following = next((other for other in imports if other not in seen), None)
            if following is None:
                reached.append(module)
                trail.pop()
            else:
                seen.add(following)
                trail.append((following, iter(sorted(graph[following]))))
    importers: dict[str, list[str]] = {module: [] for module in graph}
    for module, others in graph.items():
        for other in others:
            importers[other].append(module)
    found: list[list[str]] = []
    for root in reversed(reached):
        component, waiting = [], [root]
        while waiting:
            module = waiting.pop()
            if module in seen:
                seen.remove(module)
                component.append(module)
                waiting += importers[module]
        if len(component) > 1:
            found.append(sorted(component))
    return sorted(found, key=lambda component: (-len(component), component))


def package_cycles(sources: Path) -> dict[str, list[list[str]]]:
    """Return the circles of modules within each package that has any."""
    modules = modules_below(sources)
    graphs: dict[str, dict[str, set[str]]] = {}
    for name, path in modules.items():
        package = name.partition(".")[0]
        graphs.setdefault(package, {})[name] = {
            imported
            for imported in imports_of(name, path, modules)
            if imported.partition(".")[0] == package and imported in modules and imported != name
        }
    return {package: found for package, graph in graphs.items() if (found := cycles(graph))}


def too_large_cycles(sources: Path, allowed: dict[str, int]) -> list[str]:
    found = package_cycles(sources)
    return [
        f"{package}: {len(component)} modules import each other: {', '.join(component)}"
        for package, components in found.items()
        for component in components
        if len(component) > max(MAX_CYCLE_MODULES, allowed.get(package, 0))
    ] + [
        f"{package} obeys: delete its row in LARGEST_CYCLES"
        for package in allowed
        if max(map(len, found.get(package, [[]]))) <= MAX_CYCLE_MODULES
    ]


def public_names(path: Path) -> list[str]:
    """Return `__all__` of an `__init__`."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def imports_behind_interfaces(sources: Path, interfaces: frozenset[str]) -> list[str]:
    modules = modules_below(sources)
    public = {package: public_names(modules[package]) for package in interfaces}
    faults = [f"{package} has no __all__" for package in sorted(public) if not public[package]]
    for name, path in modules.items():
        for base, imported in import_statements(name, path):
            full = f"{base}.{imported}".rstrip(".")
            faults += [
                f"{name} must not import {full}: it is not in __all__ of {package}"
                for package in sorted(interfaces)
                if f"{full}.".startswith(f"{package}.")
                and not f"{name}.".startswith(f"{package}.")
                and (base != package or imported not in public[package])
                and base not in LOADED_ON_DEMAND
            ]
    return faults


def test_no_package_imports_a_forbidden_one() -> None:
    assert forbidden_imports(SOURCES) == []


def test_subpackages_form_layers() -> None:
    assert sibling_cycles(ALLOWED_SIBLINGS) == []
    assert unused_siblings(SOURCES) == []


def test_few_modules_import_each_other_in_a_circle() -> None:
    assert too_large_cycles(SOURCES, LARGEST_CYCLES) == []


def test_subpackages_are_imported_by_their_interface() -> None:
    assert imports_behind_interfaces(SOURCES, INTERFACES) == []


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


def test_modules_that_import_each_other_are_found(tmp_path: Path) -> None:
    tree = build_tree(
        tmp_path,
        {
            "__init__.py": "",
            "wire/__init__.py": "from sluice.wire.a import A",
            "wire/a.py": "from sluice.wire import b\nfrom sluice.wire.b import B",
            "wire/b.py": "if TYPE_CHECKING:\n    from .c import C",
            "wire/c.py": "def late() -> None:\n    import sluice.wire.a",
            "wire/d.py": "from sluice.wire import A\nfrom sluice.wire.e import E",
            "wire/e.py": "from sluice.wire.d import D",
            "store/a.py": "from sluice.store.b import B",
            "store/b.py": "from sluice.wire import a",
        },
    )
    assert package_cycles(tree) == {"wire": [["wire.a", "wire.b", "wire.c"], ["wire.d", "wire.e"]]}
    assert too_large_cycles(tree, {}) == []
    assert too_large_cycles(tree, {"wire": 3}) == ["wire obeys: delete its row in LARGEST_CYCLES"]


def test_large_circle_is_refused_up_to_its_present_size(tmp_path: Path) -> None:
    tree = build_tree(
        tmp_path, {f"wire/m{n}.py": f"from sluice.wire.m{(n + 1) % 7} import x" for n in range(7)}
    )
    names = ", ".join(f"wire.m{n}" for n in range(7))
    fault = [f"wire: 7 modules import each other: {names}"]
    assert too_large_cycles(tree, {}) == fault
    assert too_large_cycles(tree, {"wire": 6}) == fault
    assert too_large_cycles(tree, {"wire": 7}) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from sluice.cluster.plain import Bridge", None),
        ("from ..plain import Bridge", None),
        ("from sluice.cluster.plain import Hidden", "cluster.plain.Hidden"),
        ("from sluice.cluster.plain import bridge", "cluster.plain.bridge"),
        ("from sluice.cluster.plain.bridge import Bridge", "cluster.plain.bridge.Bridge"),
        ("import sluice.cluster.plain.bridge", "cluster.plain.bridge"),
        ("def late() -> None:\n    import sluice.cluster.plain", "cluster.plain"),
        ("from sluice.cluster import plain", "cluster.plain"),
        ("from sluice.cluster import plainer", None),
    ],
)
def test_import_behind_an_interface_is_found(tmp_path: Path, text: str, fault: str | None) -> None:
    tree = build_tree(
        tmp_path,
        {
            "cluster/__init__.py": "",
            "cluster/plain/__init__.py": (
                "from sluice.cluster.plain.bridge import Bridge\n__all__ = ['Bridge']"
            ),
            "cluster/plain/bridge.py": "from sluice.cluster.plain.frames import read",
            "cluster/plain/frames.py": "",
            "cluster/plainer.py": "",
            "cluster/transport/mux.py": text,
        },
    )
    assert imports_behind_interfaces(tree, frozenset({"cluster.plain"})) == (
        [f"cluster.transport.mux must not import {fault}: it is not in __all__ of cluster.plain"]
        if fault
        else []
    )
