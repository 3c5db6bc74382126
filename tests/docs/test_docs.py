"""Run the commands and programs of README and guides; compare generated pages with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker_process import Broker, StartBroker, same_build
from tests.support.doc_pages import PAGES, ROOT, QuickCli, Shell, blocks, commands
from tests.support.external_programs import need_program
from tests.support.redis_process import RedisProcess


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuickCli]:
    running = QuickCli(tmp_path_factory.mktemp("cli"))
    yield running
    running.stop()


def test_commands_of_the_redis_page_work(
    broker: Broker, start_broker: StartBroker, quick: QuickCli, tmp_path: Path
) -> None:
    """The first starts a broker on the Redis, the others speak to one that runs."""
    redis = RedisProcess(tmp_path / "redis").start()
    try:
        page = tmp_path / "page"
        page.mkdir()
        shell = Shell(page, broker, quick)
        shell.add("redis-cli", f'exec "{need_program("redis-cli")}" -p {redis.port} "$@"')
        [first, *others] = [
            (script.replace("redis://127.0.0.1:6379", redis.url), output)
            for script, output in commands("docs/redis.md")
        ]
        shell.do("sh run", *first)
        on_redis = start_broker(flags=("--store", redis.url))
        shell.use_broker(on_redis)
        for script, output in others:
            shell.do("sh run", script, output)
        on_redis.stop()
    finally:
        redis.stop()


def test_backup_of_the_reliability_page_is_complete(
    start_broker: StartBroker, quick: QuickCli, tmp_path: Path
) -> None:
    broker = start_broker()
    shell = Shell(tmp_path, broker, quick)
    publish = "for nth in 1 2 3; do sluice publish tasks job --id $nth; done"
    shell.do("sh run", publish, "")
    broker.stop()
    (broker.folder / "data").rename(tmp_path / "sluice-data")
    for script, output in commands("docs/reliability.md"):
        shell.do("sh run", script, output)


def test_every_use_case_shows_an_existing_program() -> None:
    pages = [page for page in PAGES if "use-cases" in page]
    assert len(pages) == 7
    assert [
        page for page in pages if "../../examples/" not in (ROOT / page).read_text("utf-8")
    ] == []


def test_configuration_page_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, "scripts/configuration_page.py"],
        cwd=ROOT,
        env=same_build(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert made.returncode == 0, made.stderr
    assert (ROOT / "docs/configuration.md").read_text("utf-8") == made.stdout, (
        "run scripts/make-docs"
    )


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_resolve(page: str) -> None:
    text = re.sub(r"<!--.*?-->", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, spelled as Git hosting sites do."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES)
def test_links_into_pages_resolve_to_a_heading(page: str) -> None:
    here = ROOT / page
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", here.read_text("utf-8"))
    wanted = [(link, anchor) for link, anchor in links if not link or link.endswith(".md")]
    missing = [
        f"{link}#{anchor}"
        for link, anchor in wanted
        if anchor not in anchors(here.parent / link if link else here)
    ]
    assert missing == []


def test_functions_named_in_the_architecture_exist() -> None:
    readmes = sorted((ROOT / "src/sluice").glob("*/README.md"))
    pages = ["ARCHITECTURE.md", *(str(readme.relative_to(ROOT)) for readme in readmes)]
    paths = [text for page in pages for info, text in blocks(page) if info == "text path"]
    steps = re.findall(
        r"\b((?:access|admin|broker|cluster|queues|store|wire)(?:/\w+)+)\.(\w+)", "\n".join(paths)
    )
    assert len(steps) > 40
    sources = ROOT / "src/sluice"
    missing = [
        f"{module}.{name}"
        for module, name in steps
        if not re.search(
            rf"^ *(?:async )?def {name}\b",
            (sources / f"{module}.py").read_text("utf-8"),
            re.MULTILINE,
        )
    ]
    assert missing == []
