"""ARCHITECTURE.md, CONTRIBUTING.md and the READMEs of the packages describe the code as it is."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/sluice"
READMES = sorted(SOURCES.glob("*/README.md"))
PAGES = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *READMES]

# `queues/log/notes`, `flow/dispatch.dispatch_cursor`, `model/`, `queues/model/cursor.py`
PATH = re.compile(r"`((?:[a-z_0-9]+/)+)([a-z_0-9]+)?(\.py|\.\w+)?`")


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def sources_of(place: Path) -> str:
    """Return the text of a module, or of all modules of a package."""
    module = place.with_suffix(".py")
    paths = [module] if module.exists() else sorted(place.rglob("*.py"))
    return "\n".join(path.read_text("utf-8") for path in paths)


def missing_paths(text: str, package: Path) -> list[str]:
    """Return the paths of modules in `text` that do not exist, or lack the name after the dot.

    A path begins at the package of the page, in a folder of that package, at `sluice`, or at the
    root of the project.
    """
    missing = []
    folders_of_package = [path for path in package.rglob("*/") if path.is_dir()]
    for found in PATH.finditer(text):
        folders, module, name = found.groups()
        path = folders + (module or "")
        places = [base / path for base in (package, *folders_of_package, SOURCES, ROOT)]
        existing = [
            place for place in places if place.exists() or place.with_suffix(".py").exists()
        ]
        if name and name != ".py":
            word = re.compile(rf"^ *(?:(?:async )?def|class) {name[1:]}\b|^{name[1:]}\b", re.M)
            has_name = any(word.search(sources_of(place)) for place in existing)
            if not has_name and not any(place.with_suffix(name).exists() for place in places):
                missing.append(found[0])
        elif not existing:
            missing.append(found[0])
    return missing


def missing_in_tables(text: str, package: Path) -> list[str]:
    """Return the modules that a table lists and the package does not have.

    The first column names modules, or a folder with a slash at its end. Then the second column
    names modules of the folder, or what they define.
    """
    missing = []
    for table in re.findall(r"^\| module \| contents \|\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines()[1:]:
            first, second = row.strip("|").split(" | ", 1)
            names = re.findall(r"`([a-z_/0-9]+)`", first)
            missing += [
                name
                for name in names
                if not (package / name).exists() and not (package / f"{name}.py").exists()
            ]
            if len(names) == 1 and names[0].endswith("/"):
                folder = package / names[0]
                text_of_folder = sources_of(folder)
                missing += [
                    f"{names[0]}{name}"
                    for name in re.findall(r"`([a-z_0-9]+)`", second)
                    if not (folder / name).exists()
                    and not (folder / f"{name}.py").exists()
                    and not re.search(rf"\b{name}\b", text_of_folder)
                ]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_named_on_a_page_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert missing_paths(text, page.parent) == []
    if page in READMES:
        assert missing_in_tables(text, page.parent) == []


def test_every_module_of_the_queues_is_in_its_readme() -> None:
    package = SOURCES / "queues"
    text = (package / "README.md").read_text("utf-8")
    modules = {path.stem for path in package.rglob("*.py")} - {"__init__"}
    assert [module for module in sorted(modules) if f"`{module}`" not in text] == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`queues/model/cursor`, `queues/model/cursor.py` and `model/`", []),
        ("`model/cursor.next_ready` and `queues/model/cursor.Cursor`", []),
        ("`queues/flow/clocks`", ["`queues/flow/clocks`"]),
        ("`flow/dispatch.offer`", ["`flow/dispatch.offer`"]),
        ("`queues/models/`", ["`queues/models/`"]),
    ],
)
def test_missing_module_is_found(text: str, missing: list[str]) -> None:
    assert missing_paths(text, SOURCES / "queues") == missing


def test_missing_module_in_a_table_is_found() -> None:
    table = (
        "| module | contents |\n|---|---|\n| `engine`, `motor` | x |\n| `log/` | `notes`, `ink` |\n"
    )
    assert missing_in_tables(table, SOURCES / "queues") == ["motor", "log/ink"]


def test_delivery_states_are_those_of_the_table() -> None:
    states = load_script("state_table")
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert states.write_table(page) == page, "run scripts/make-docs"
    assert "| LEASED | READY |" in page and states.TABLE.search(page)


def test_paths_of_a_message_are_short_and_as_on_the_page() -> None:
    made = subprocess.run(
        [sys.executable, "scripts/trace_path.py", "--check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 0, made.stdout + made.stderr


def test_path_that_is_too_long_or_not_as_traced_is_found() -> None:
    tracing = load_script("trace_path")

    def call(name: str, depth: int) -> object:
        module, _, function = name.rpartition(".")
        return tracing.Call(module, function, depth)

    trace = tracing.Trace(
        [call("a.in", 0), call("b.through", 1), call("c.end", 2), call("a.out", 0), call("b.x", 1)]
    )
    assert trace.entries() == {"a": 2, "b": 1}  # c leads to no other file, nor does b.x
    assert tracing.too_long({"publish": trace}) == []
    long = tracing.Trace(
        [call(f"m{nth}.f", nth) for nth in range(tracing.MAX_FILES["publish"] + 2)]
    )
    (fault,) = tracing.too_long({"publish": long})
    assert fault.startswith("publish passes 21 files, not 20: m0, ")
    turns = [call("a.in", 0), call("b.x", 1)] * (tracing.MAX_ENTRIES + 1)
    assert tracing.too_long({"publish": tracing.Trace(turns)}) == [
        "publish enters a 3 times, not 2"
    ]

    path = "c.end last\na.in first\nd.gone\n"
    page = f"<!-- trace ack -->\n```text path\n{path}```\n<!-- end of trace -->"
    assert tracing.differences(page, {"ack": trace}) == [
        "the path of ack in ARCHITECTURE.md is not as traced: run scripts/trace-path --write"
    ]
    written = tracing.write_paths(page, {"ack": trace})
    assert "\na.in     first\n  c.end  last\n```" in written
    assert tracing.differences(written, {"ack": trace}) == []
