"""Check that names, comments, texts and pages use the terms of GLOSSARY.md, and wrap their lines.

Usage: check_words.py [PATH...]. The words to avoid are in banned-words.txt beside this file. Exit
code 1 if one is used. A line that must contain such a word (a quotation, a name of another system)
says `words: allowed`, in Markdown in a comment `<!-- words: allowed -->` on the line before; before
a fenced block it covers the block.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = Path(__file__).with_name("banned-words.txt")
EXEMPT = {"GLOSSARY.md", "scripts/banned-words.txt", "CHANGELOG.md"}
TEXT_SUFFIXES = {".md", ".js", ".html", ".css", ".proto", ".toml", ".service"}
SCRIPT_SUFFIXES = {"", ".sh", ".yml"}  # only their lines are measured; ruff does so for Python
# A line of a table or with a long word, or one quoted string, cannot be wrapped.
UNBREAKABLE = re.compile(r"\S{60}|^\s*\||^\s*\"[^\"]*\",?$")
ALLOWED = "words: allowed"
MAX_LINE = 100

Rule = tuple[re.Pattern[str], str]


def load_rules() -> tuple[list[Rule], dict[str, str]]:
    prose: list[Rule] = []
    identifiers: dict[str, str] = {}
    in_identifiers = False
    for line in WORDS.read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if line == "[identifiers]":
            in_identifiers = True
            continue
        words, _, instead = line.partition("\t")
        if in_identifiers:
            identifiers.update(dict.fromkeys(words.split("|"), instead))
        else:
            prose.append((re.compile(words, re.IGNORECASE), instead))
    return prose, identifiers


def parts_of(identifier: str) -> list[str]:
    """Split snake_case and CamelCase into lower-case words."""
    return re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", identifier).lower())


def check_prose(text: str, rules: list[Rule]) -> Iterator[str]:
    for pattern, instead in rules:
        for found in pattern.finditer(text):
            yield f"{found[0]!r}: write {instead}"


def check_python(
    path: Path, prose: list[Rule], identifiers: dict[str, str]
) -> Iterator[tuple[int, str]]:
    source = path.read_text("utf-8")
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
            continue
        row = token.start[0]
        if ALLOWED in lines[row - 1]:
            continue
        if token.type == tokenize.NAME:
            parts = parts_of(token.string)
            for before, part in zip(["", *parts], parts):
                if part in identifiers and before != "dead":  # a dead letter is AMQP's word
                    yield row, f"name {token.string!r}: see {identifiers[part]}"
        else:
            for offset, text in enumerate(token.string.split("\n")):
                for fault in check_prose(text, prose):
                    yield row + offset, fault


def check_text(path: Path, prose: list[Rule]) -> Iterator[tuple[int, str]]:
    lines = path.read_text("utf-8").splitlines()
    in_fence = allowed_fence = False
    for row, line in enumerate(lines, 1):
        allowed = ALLOWED in line or (row > 1 and ALLOWED in lines[row - 2])
        if line.startswith("```"):
            in_fence = not in_fence
            allowed_fence = in_fence and allowed
        if allowed or allowed_fence:
            continue
        for fault in check_prose(line, prose):
            yield row, fault
        yield from check_length(row, line)


def check_length(row: int, line: str) -> Iterator[tuple[int, str]]:
    if len(line) > MAX_LINE and not UNBREAKABLE.search(line):
        yield row, f"{len(line)} characters: wrap lines at {MAX_LINE}"


def check_script(path: Path) -> Iterator[tuple[int, str]]:
    for row, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        yield from check_length(row, line)


def main(arguments: list[str]) -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    prose, identifiers = load_rules()
    faults = 0
    for name in sorted(set(listed.stdout.split("\n"))):
        path = ROOT / name
        if not name or name in EXEMPT or "_pb2" in name or not path.is_file():
            continue
        found: Iterator[tuple[int, str]] = iter(())
        if path.suffix == ".py":
            found = check_python(path, prose, identifiers)
        elif path.suffix in TEXT_SUFFIXES:
            found = check_text(path, prose)
        elif path.suffix in SCRIPT_SUFFIXES:
            found = check_script(path)
        for row, fault in found:
            print(f"{name}:{row}: {fault}")
            faults += 1
    if faults:
        print(f"{faults} faults; GLOSSARY.md has the terms to use", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
