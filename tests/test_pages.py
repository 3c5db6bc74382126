"""The pages that show a newcomer round are walked through as they stand: every command and program on them runs, in
order, and says what the page says. Whatever else the pages show of the command line, the command line takes."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer

from sluice.cli import app
from sluice.queues import snapshot
from sluice.store.embedded import layout
from tests.brokers import Broker
from tests.pages import PAGES, ROOT, QuickCli, Shell, blocks, steps
from tests.services import need_program

WALKED = (
    "docs/getting-started.md",
    "docs/concepts.md",
    "docs/migrating.md",
    "docs/operations.md",
    "docs/troubleshooting.md",
    "docs/upgrading.md",
)
# Walked through by test_docs.py, or by the tests of the room that they tell of.
WALKED_ELSEWHERE = (
    "README.md",
    "docs/client.md",
    "docs/compacted.md",
    "docs/grpc.md",
    "docs/queues.md",
    "docs/reliability.md",
    "docs/rest.md",
    "docs/spark.md",
)
COMMAND: Any = typer.main.get_command(app)
STEPS = [(page, *step) for page in WALKED for step in steps(page)]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for all pages: each page has queues of its own."""
    running = Broker(tmp_path_factory.mktemp("broker"), "", (), {})
    yield running
    running.stop()
    assert "Traceback" not in running.log_text()


@pytest.fixture(scope="module")
def shells(house: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Shell]]:
    """A shell for each page: what one step leaves behind, the next one finds."""
    need_program("mosquitto_pub")
    quick = QuickCli(tmp_path_factory.mktemp("cli"))
    yield {page: Shell(tmp_path_factory.mktemp(Path(page).stem), house, quick) for page in WALKED}
    quick.stop()


@pytest.mark.parametrize(
    ("page", "info", "text", "output"),
    STEPS,
    ids=[f"{Path(page).stem}-{nth}" for nth, (page, *_) in enumerate(STEPS)],
)
def test_a_step_of_a_page_does_what_it_says(
    page: str, info: str, text: str, output: str, shells: dict[str, Shell]
) -> None:
    shells[page].do(info, text, output)


def test_what_is_marked_to_run_is_run() -> None:
    marked = {
        page for page in PAGES if "use-cases" not in page and any(i.endswith(" run") for i, *_ in steps(page))
    }
    assert marked - set(WALKED) == set(WALKED_ELSEWHERE)


class Links(HTMLParser):
    """What a page of the site leads to and loads, and what can be led to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ways: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.ways.append(value)
            elif name == "id" and value:
                self.names.add(value)


def test_the_site_has_all_pages_and_every_way_in_it_leads_somewhere(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "scripts/site.py", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert made.returncode == 0, made.stderr
    pages = {page: Links(page) for page in tmp_path.rglob("*.html")}
    written = {str(page.relative_to(tmp_path).with_suffix(".md")) for page in pages}
    assert {page for page in PAGES if page.startswith("docs/")} <= written
    for page, links in pages.items():
        for way in links.ways:
            if re.match(r"(https?|mailto):", way):
                continue
            place, _, name = way.partition("#")
            target = (page.parent / place).resolve() if place else page
            assert target.is_file(), f"{page}: {way}"
            assert not name or name in pages[target].names, f"{page}: {way}"


def test_the_versions_of_what_is_kept_are_those_of_the_code() -> None:
    page = (ROOT / "docs/upgrading.md").read_text("utf-8")
    assert f"snapshot file | {layout.VERSION} | {layout.VERSION} |" in page
    reads = ", ".join(str(version) for version in range(snapshot.OLDEST, snapshot.VERSION + 1))
    assert f"in the snapshot | {snapshot.VERSION} | {reads} |" in page


@pytest.mark.parametrize("page", PAGES)
def test_what_is_shown_and_not_run_can_at_least_be_read(page: str) -> None:
    for info, text in blocks(page):
        if info.startswith("python"):
            compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif info.startswith("toml"):
            tomllib.loads(text)
        elif info == "sh":
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)


# ---- commands that are shown, and not run because of what they would do


def shown() -> Iterator[tuple[str, str]]:
    """Each line of a page that begins with `sluice`, in a block or indented like one; continued lines joined."""
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:    |\$ |)(sluice .*)$", text, re.MULTILINE):
            if not re.match(r"sluice(: | \d|\S* ready)", line):
                yield page, line


def fault_of(line: str) -> str:
    """Why the command line would not take it, or nothing. Its own words alone are looked at, up to a pipe."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            break
        words.append(word)
    command, words = COMMAND, words[1:]
    while below := getattr(command, "commands", None):
        if not words or words[0].startswith("-"):
            return ""
        if words[0] not in below:
            return f"there is no command {words[0]}"
        command, words = below[words[0]], words[1:]
    known = {flag for one in command.params for flag in [*one.opts, *one.secondary_opts]}
    flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return ", ".join(sorted(flags - known - {"--help", "-h"}))


def test_every_command_that_a_page_shows_is_one_that_there_is() -> None:
    lines = list(shown())
    assert len(lines) > 80
    assert [(page, line, fault) for page, line in lines if (fault := fault_of(line))] == []
