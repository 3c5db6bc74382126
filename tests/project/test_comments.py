"""Comments and decisions name modules, classes and functions that exist."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/sluice"
MODULES = sorted(path for path in SOURCES.rglob("*.py") if "_pb2" not in path.name)
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
FOLDERS = ("src", "tests", "bench", "scripts", "fuzz", "examples")
FILES = [f"/{path.name}" for path in ROOT.glob("*.py")] + [
    str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
]

REFERENCE = re.compile(r"`((?:[a-z_0-9]+/)*)(\w+)\.(\w+)`")
# `redis.prefix`, `sluice.alert_handlers`: keys and names of the pages, not names in a module
KEYS = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))


class Names:
    """What modules and classes define or use, by their own names."""

    def __init__(self, modules: list[Path]) -> None:
        self.of_modules: dict[str, set[str]] = {}
        self.of_classes: dict[str, set[str]] = {}
        self._bases: dict[str, list[str]] = {}
        for path in modules:
            tree = ast.parse(path.read_text("utf-8"))
            stem = path.parent.name if path.stem == "__init__" else path.stem
            self.of_modules.setdefault(stem, set()).update(names_in(tree))
            for inner in (path, *path.relative_to(ROOT / "src").parents):
                self.of_modules.setdefault(inner.parent.name, set()).add(inner.stem)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.of_classes.setdefault(node.name, set()).update(names_in(node))
                    self._bases.setdefault(node.name, []).extend(map(ast.unparse, node.bases))

    def has_member(self, name: str, member: str) -> bool:
        bases = self._bases.get(name, [])
        return (
            name not in self.of_classes
            or member in self.of_classes[name]
            or any(base.split(".")[-1] not in self.of_classes for base in bases)
            or any(self.has_member(base, member) for base in bases)
        )


def names_in(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.add(value)
    return found


def comments_of(path: Path) -> Iterator[str]:
    """Return the comments and docstrings of a module, or the lines of a page."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        yield text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            yield token.string


def broken_references(texts: Iterator[str], names: Names) -> list[str]:
    """Return the references that lead nowhere: `Class.member`, `module.name`, `package/module.py`.

    A text that a page of settings or routes contains is a key, and not a reference.
    """
    broken = []
    for text in texts:
        for found in REFERENCE.finditer(text):
            folders, owner, member = found.groups()
            if member == "py":
                file = f"/{folders}{owner}.py"
                is_broken = not any(path.endswith(file) for path in FILES)
            elif owner[0].isupper():
                is_broken = not names.has_member(owner, member)
            else:
                is_broken = (
                    owner in names.of_modules
                    and member not in names.of_modules[owner]
                    and f"{owner}.{member}" not in KEYS
                )
            if is_broken:
                broken.append(found[0])
    return broken


@pytest.fixture(scope="module")
def names() -> Names:
    return Names(MODULES)


def test_comments_name_what_exists(names: Names) -> None:
    broken = {
        str(path.relative_to(ROOT)): found
        for path in [*MODULES, *DECISIONS]
        if (found := broken_references(comments_of(path), names))
    }
    assert broken == {}


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("`Cursor.next_ready`, `loop.CommitLoop`, `queues/model/cursor.py`, `redis.prefix`", []),
        ("`BroadcastCursor.next`, `InboundQos.on_written`", []),  # no class of ours; inherited
        ("`Cursor.next_hungry`", ["`Cursor.next_hungry`"]),  # words: allowed
        ("`cursor.next_hungry`", ["`cursor.next_hungry`"]),  # words: allowed
        ("`queues/cursor.py`", ["`queues/cursor.py`"]),
    ],
)
def test_broken_reference_is_found(text: str, broken: list[str], names: Names) -> None:
    assert broken_references(iter([text]), names) == broken
