"""Run the guide pages: every command and program on them, in order, with the output they show.

Commands that a page only mentions are parsed by the command line.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import typer

from sluice.cli.root import app
from sluice.config.setting_types import ConfigSection
from sluice.config.settings import Settings
from sluice.queues.recovery import snapshot
from sluice.store.embedded import layout
from tests.support.broker_process import Broker
from tests.support.doc_pages import FILE, PAGES, ROOT, QuickCli, Shell, blocks, steps
from tests.support.external_programs import need_program

WEBHOOKS = '[webhooks]\nallow = ["127.0.0.0/8"]\n'
# A failed job waits long enough for a busy machine to query it.
LONG_BACKOFF = (
    '[[queues.templates]]\nmatch = "tasks"\n'
    'config = { retry_policy = { initial_backoff = "5m" } }\n'
)
# Pages with a broker and a configuration of their own; the others share one broker.
ALONE = {
    "README.md": LONG_BACKOFF,
    "docs/cli.md": "",
    "docs/client.md": "",
    "docs/compacted.md": "",
    "docs/getting-started.md": "",
    "docs/queues.md": "",
    "docs/troubleshooting.md": "",  # it shows queues of similar names
}
WALKED_PAGES = (
    *ALONE,
    "docs/concepts.md",
    "docs/control.md",
    "docs/fastapi.md",
    "docs/migrating.md",
    "docs/operations.md",
    "docs/performance.md",
    "docs/processes.md",
    "docs/security.md",
    "docs/upgrading.md",
    *(page for page in PAGES if "use-cases" in page),
)
# Run by test_docs.py, or by the tests of the package that they describe.
WALKED_ELSEWHERE = {
    "docs/bulk.md": "tests/bulk/test_docs_page.py",
    "docs/cluster.md": "tests/cluster/real_nodes/test_docs_page.py",
    "docs/grpc.md": "tests/admin/grpc/test_docs_page.py",
    "docs/metrics.md": "tests/admin/metrics/test_docs_page.py",
    "docs/pipelines.md": "tests/spark/pipelines/test_docs_page.py",
    "docs/redis.md": "tests/docs/test_docs.py",
    "docs/reliability.md": "tests/docs/test_docs.py",
    "docs/rest.md": "tests/admin/rest/test_docs_page.py",
    "docs/spark.md": "tests/spark/source/test_docs_page.py",
}
MODULE = """
from sluice.worker import Worker

app = Worker(name="{name}")

@app.task("{queue}")
def work(job: str) -> None: ...
"""
# Files that the reader of the page already has.
PREPARED = {
    "docs/cli.md": {
        "sluice.toml": "[mqtt]\nmax_qos = 1\n",
        "thumb.json": '{"partitions": 2}',
        "job.json": '{"order": 17}',
        "access.log": "GET /\nGET /cats\n",
        "rules.toml": '[[rule]]\nallow = ["connect", "queue-publish"]\nqueues = ["#"]\n',
        "images.py": MODULE.format(name="resizers", queue="images/new"),
        "shop/jobs.py": MODULE.format(name="shop", queue="orders"),
    },
}
PROGRAMS = (
    *(
        "sluice",
        "python3?",
        r"\.venv/\S+",
        r"scripts/\S+",
        r"bench/\S+",
        "pip",
        "apt-get",
        "docker",
        "systemctl",
    ),
    *(
        "journalctl",
        "curl",
        r"mosquitto_\w+",
        "redis-cli",
        r"spark-\w+",
        "cat",
        "cp",
        "kill",
        "export",
        "install",
    ),
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMAND: Any = typer.main.get_command(app)
STEPS = [(page, *step) for page in WALKED_PAGES for step in steps(page)]


class PageWalk:
    """Return one shell per page, so that steps share files. A broker starts with its first page."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._quick = QuickCli(folders.mktemp("cli"))
        self._brokers: dict[str, Broker] = {}
        self._shells: dict[str, Shell] = {}

    def shell(self, page: str) -> Shell:
        if page not in self._shells:
            harness = page if page in ALONE else ""
            if harness not in self._brokers:
                config = ALONE.get(page, WEBHOOKS)
                self._brokers[harness] = Broker(self._folders.mktemp("broker"), config, (), {})
            shell = Shell(
                self._folders.mktemp(Path(page).stem), self._brokers[harness], self._quick
            )
            prepare(shell, page)
            self._shells[page] = shell
        return self._shells[page]

    def end(self) -> None:
        self._quick.stop()
        for broker in self._brokers.values():
            broker.stop()
            assert "Traceback" not in broker.log_text()


def prepare(shell: Shell, page: str) -> None:
    for name, text in PREPARED.get(page, {}).items():
        (shell.folder / name).parent.mkdir(exist_ok=True)
        (shell.folder / name).write_text(text)
    if page == "docs/performance.md" and not shutil.which("mosquitto", path=shell.environ["PATH"]):
        need_program("mosquitto")
    if page == "docs/security.md":
        certificate = trustme.CA().issue_cert("localhost")
        certificate.private_key_pem.write_to_path(str(shell.folder / "key.pem"))
        certificate.cert_chain_pems[0].write_to_path(str(shell.folder / "chain.pem"))
    if page == "docs/upgrading.md":  # the page upgrades an installation
        (shell.root / "var/lib/sluice").mkdir()
        for info, text, _ in steps("docs/operations.md"):
            if "/opt/sluice" in text:
                shell.do(info, text, "")


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageWalk]:
    need_program("mosquitto_pub")
    walk = PageWalk(tmp_path_factory)
    yield walk
    walk.end()


@pytest.mark.parametrize(
    ("page", "info", "text", "output"),
    STEPS,
    ids=[f"{Path(page).stem}-{nth}" for nth, (page, *_) in enumerate(STEPS)],
)
def test_step_of_a_page_works(page: str, info: str, text: str, output: str, walk: PageWalk) -> None:
    walk.shell(page).do(info, text, output)


def test_everything_a_reader_can_copy_is_tested() -> None:
    """Fail for a block of commands or a program that no test runs."""
    pages = [page for page in PAGES if page == "README.md" or page.startswith("docs/")]
    for page in pages:
        kinds = [info for info, _ in blocks(page)]
        done = [kind for kind in kinds if kind in ("sh run", "python run") or FILE.fullmatch(kind)]
        loose = [
            kind
            for kind in kinds
            if kind.split()[:1] in ([], ["sh"], ["python"]) and kind not in done
        ]
        assert not loose, f"{page}: {loose}"
        assert not done or page in WALKED_PAGES or page in WALKED_ELSEWHERE, (
            f"{page} is not walked through"
        )
    for page, test in WALKED_ELSEWHERE.items():
        assert page in (ROOT / test).read_text("utf-8"), f"{test} does not speak of {page}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page == "README.md" or page.startswith("docs/")]
)
def test_commands_are_in_code_blocks(page: str) -> None:
    """Commands are in fenced blocks: an indented line cannot be marked to be run."""
    text = FENCED.sub("", (ROOT / page).read_text("utf-8"))
    assert (
        re.findall(
            rf"^(?:    |\$ )(?:\w+=\S+ )*(?:{'|'.join(PROGRAMS)})(?= |$).*", text, re.MULTILINE
        )
        == []
    )


@pytest.mark.timeout(240)
def test_site_has_all_pages_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    """The generator runs in strict mode: it fails for a link or an anchor that does not exist."""
    made = subprocess.run(
        ["bash", "scripts/make-docs", "--site", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    for page in PAGES:
        if page.startswith("docs/"):
            name = page.removesuffix(".md") + ".html"
            assert (tmp_path / name.replace("README.html", "index.html")).is_file()
    assert (tmp_path / "search.json").stat().st_size > 100_000
    for path in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)', path.read_text("utf-8")
        )
        assert loaded == [], path
    assert "Publisher" in (tmp_path / "docs/api.html").read_text("utf-8")


def test_documented_format_versions_match_the_code() -> None:
    page = (ROOT / "docs/upgrading.md").read_text("utf-8")
    assert f"snapshot file | {layout.LAYOUT_VERSION} | {layout.LAYOUT_VERSION} |" in page
    reads = ", ".join(
        str(version) for version in range(snapshot.OLDEST_VERSION, snapshot.VERSION + 1)
    )
    assert f"in the snapshot | {snapshot.VERSION} | {reads} |" in page


@pytest.mark.parametrize("page", PAGES)
def test_documents_on_a_page_parse_and_settings_exist(page: str) -> None:
    for info, text in blocks(page):
        kind = info.partition(" ")[0]
        if kind == "json":
            json.loads(text)
        elif kind == "toml" and not info.endswith(("rules.toml", "pyproject.toml")):
            unknown_keys(tomllib.loads(text), Settings)


def unknown_keys(reported: dict[str, Any], section: type[ConfigSection]) -> None:
    for name, value in reported.items():
        assert name in section.model_fields, f"{section.__name__} has no {name}"
        inner = section.model_fields[name].annotation
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, ConfigSection):
            unknown_keys(value, inner)


# ---- commands in the text and in tables


def shown() -> Iterator[tuple[str, str]]:
    """Yield each line of a page that begins with `sluice`; continued lines are joined."""
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:    |\$ |)(sluice .*)$", text, re.MULTILINE):
            if not re.match(r"sluice(: | \d|\S* ready)", line):
                yield page, line


def fault_of(line: str) -> str:
    """Return why the command line would refuse a command, or "". Stop at a pipe."""
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


def test_every_command_shown_on_a_page_exists() -> None:
    lines = list(shown())
    assert len(lines) > 80
    assert [(page, line, fault) for page, line in lines if (fault := fault_of(line))] == []
