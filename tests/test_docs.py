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
from tests.services import need_program

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "fuzz/*.md")
    for page in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: info string and text."""
    return [(found["info"], found["text"]) for found in FENCE.finditer((ROOT / page).read_text("utf-8"))]


def commands(page: str) -> list[tuple[str, str]]:
    """Each `sh run` block, and what the `text output` block behind it says."""
    found = blocks(page)
    after = [*found[1:], ("", "")]
    return [
        (text, next_text if next_info == "text output" else "")
        for (info, text), (next_info, next_text) in zip(found, after, strict=True)
        if info == "sh run"
    ]


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


def check(script: str, output: str, folder: Path, environ: dict[str, str]) -> None:
    """Run a script and compare all it says, line by line; `...` in the page stands for anything."""
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=40,
    )
    # "Timed out" is mosquitto_sub at the end of the time that -W gives it.
    said = [line for line in done.stdout.splitlines() if line not in ("Timed out", "")]
    wanted = output.splitlines()
    assert len(said) == len(wanted), done.stdout
    for line, pattern in zip(said, wanted, strict=True):
        words = re.escape(pattern).replace(re.escape("..."), ".*")
        assert re.fullmatch(words, line), f"{line!r} is not {pattern!r}"


def test_the_commands_of_the_readme_do_what_they_say(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker()
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
    text = (ROOT / page).read_text("utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
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
