"""What the documentation shows is run: the README's commands and program, those of the guides, the made pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.brokers import Broker, StartBroker, same_build
from tests.pages import PAGES, ROOT, blocks, check, commands
from tests.services import need_program


def title_of(text: str) -> str:
    """A name for a test: the first queue that a block speaks of."""
    queue = re.search(r"\$(?:queue|ECQ/w)/([\w-]+)", text)
    return queue[1] if queue else "block"


@pytest.fixture(scope="module")
def shell(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder and an environment in which the mosquitto clients speak to the test's broker by default."""
    need_program("mosquitto_pub")
    folder = tmp_path_factory.mktemp("shell")
    for name in ("mosquitto_pub", "mosquitto_sub"):
        (folder / name).write_text(f"-h {broker.mqtt.host}\n-p {broker.mqtt.port}\n")
    yield folder, {**os.environ, "XDG_CONFIG_HOME": str(folder)}
    assert "Traceback" not in broker.log_text()


COMMANDS = commands("docs/queues.md") + commands("docs/compacted.md")


@pytest.mark.parametrize(("script", "output"), COMMANDS, ids=[title_of(script) for script, _ in COMMANDS])
def test_a_command_of_the_guides_to_queues_does_what_it_says(
    script: str, output: str, shell: tuple[Path, dict[str, str]]
) -> None:
    check(script, output, *shell)


def test_the_commands_of_the_readme_do_what_they_say(start_broker: StartBroker, tmp_path: Path) -> None:
    # A failed job waits for as long as it takes a busy machine to ask about it.
    patience = 'config = { retry_policy = { initial_backoff = "5m" } }'
    broker = start_broker(config=f'[[queues.templates]]\nmatch = "#"\n{patience}')
    environ = {
        **same_build(),
        "SLUICE_URL": f"http://{broker.address('http')}",
        "SLUICE_MQTT": f"{broker.mqtt}",
    }
    [(script, output)] = commands("README.md")
    check(f'sluice() {{ "{sys.executable}" -m sluice "$@"; }}\n{script}', output, tmp_path, environ)


def test_the_program_of_the_readme_runs(start_broker: StartBroker, tmp_path: Path) -> None:
    [program] = [text for info, text in blocks("README.md") if info == "python run"]
    broker = start_broker()
    done = subprocess.run(
        [sys.executable, "-c", program.replace("localhost", f"{broker.mqtt}")],
        env=same_build(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "resize cat.png\n"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for the client library's page and the use cases: each block has a queue of its own."""
    running = Broker(tmp_path_factory.mktemp("broker"), '[webhooks]\nallow = ["127.0.0.0/8"]\n', (), {})
    yield running
    running.stop()
    assert "Traceback" not in running.log_text()


PROGRAMS = [
    (text, following)
    for (info, text), (_, following) in pairwise(blocks("docs/client.md"))
    if info == "python run"
]


@pytest.mark.parametrize(("program", "output"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_page_of_the_client_library_does_what_it_says(
    program: str, output: str, house: Broker, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(program.replace("localhost", f"{house.mqtt}"))
    check(f'"{sys.executable}" program.py', output, tmp_path, same_build())


USE_CASES = [
    (page, script, output) for page in PAGES if "use-cases" in page for script, output in commands(page)
]


@pytest.mark.parametrize(
    ("page", "script", "output"), USE_CASES, ids=[Path(page).stem for page, *_ in USE_CASES]
)
def test_a_command_of_a_use_case_does_what_it_says(
    page: str, script: str, output: str, house: Broker, tmp_path: Path
) -> None:
    need_program("mosquitto_rr")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("mosquitto_pub", "mosquitto_sub", "mosquitto_rr"):
        (tmp_path / name).write_text(f"-h {house.mqtt.host}\n-p {house.mqtt.port}\n")
    environ = {
        **same_build(),
        "XDG_CONFIG_HOME": str(tmp_path),
        "SLUICE_MQTT": str(house.mqtt),
        "SLUICE_URL": f"http://{house.address('http')}",
    }
    check(f'python() {{ "{sys.executable}" "$@"; }}\n{script}', output, tmp_path, environ)


def test_a_backup_as_the_page_of_reliability_makes_it_is_whole(start_broker: StartBroker) -> None:
    broker = start_broker()
    sluice = f'sluice() {{ "{sys.executable}" -m sluice "$@"; }}'
    environ = {
        **same_build(),
        "SLUICE_MQTT": f"{broker.mqtt}",
        "SLUICE_URL": f"http://{broker.address('http')}",
    }
    publish = f"{sluice}; for nth in 1 2 3; do sluice publish tasks job --id $nth; done"
    check(
        publish, "Published 1 to tasks.\nPublished 2 to tasks.\nPublished 3 to tasks.", broker.folder, environ
    )
    broker.stop()
    (broker.folder / "data").rename(broker.folder / "sluice-data")
    [(script, output)] = commands("docs/reliability.md")
    check(f"{sluice}\n{script}", output, broker.folder, environ)


def test_every_use_case_shows_a_program_that_is_there() -> None:
    pages = [page for page in PAGES if "use-cases" in page]
    assert len(pages) == 7
    assert [page for page in pages if "../../examples/" not in (ROOT / page).read_text("utf-8")] == []


def test_the_page_of_the_configuration_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, "scripts/configuration_page.py"],
        cwd=ROOT,
        env=same_build(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert made.returncode == 0, made.stderr
    assert (ROOT / "docs/configuration.md").read_text("utf-8") == made.stdout, "run scripts/make-docs"


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = re.sub(r"<!--.*?-->", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: its headings, as the sites that show these pages spell them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES)
def test_links_into_pages_lead_to_a_heading(page: str) -> None:
    here = ROOT / page
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", here.read_text("utf-8"))
    wanted = [(link, anchor) for link, anchor in links if not link or link.endswith(".md")]
    missing = [
        f"{link}#{anchor}"
        for link, anchor in wanted
        if anchor not in anchors(here.parent / link if link else here)
    ]
    assert missing == []


def test_the_paths_of_the_architecture_name_functions_that_are_there() -> None:
    paths = [text for info, text in blocks("ARCHITECTURE.md") if info == "text path"]
    steps = re.findall(
        r"\b((?:access|admin|broker|cluster|queues|store|wire)(?:/\w+)+)\.(\w+)", "\n".join(paths)
    )
    assert len(steps) > 40
    sources = ROOT / "src/sluice"
    missing = [
        f"{module}.{name}"
        for module, name in steps
        if not re.search(
            rf"^ *(?:async )?def {name}\b", (sources / f"{module}.py").read_text("utf-8"), re.MULTILINE
        )
    ]
    assert missing == []
