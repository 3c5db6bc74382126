"""The console and the documentation as they are served."""

from __future__ import annotations

import re
from pathlib import Path

import sluice
from tests.admin.rest.conftest import Door

OURS = Path(sluice.__file__).parent / "admin"


async def test_the_console_is_served_from_the_package(door: Door) -> None:
    page = await door.web.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in re.findall(r'(?:src|href)="(/console/[^"]+)"', page.text):
        part = await door.web.get(path)
        assert part.status_code == 200, path
        assert part.headers["cache-control"] == "no-cache"


async def test_a_page_that_has_not_changed_is_not_sent_again(door: Door) -> None:
    first = await door.web.get("/docs")
    again = await door.web.get("/docs", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_files_beside_the_pages_are_out_of_reach(door: Door) -> None:
    for path in (
        "/console/../service.py",
        "/console/%2e%2e/service.py",
        "/console/..%2fservice.py",
        "/docs//etc/passwd",
    ):
        answer = await door.web.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["error"] == "no_such_page"


async def test_the_documentation_loads_only_what_this_server_has(door: Door) -> None:
    page = (await door.web.get("/docs")).text
    parts = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert parts
    for part in parts:
        assert part.startswith("/"), part
        assert (await door.web.get(part)).status_code == 200, part


def test_no_page_names_another_host() -> None:
    """An address is only ever text or a namespace, never something to load."""
    for folder in (OURS / "console", OURS / "rest" / "docs"):
        for file in sorted(
            path for path in folder.rglob("*") if path.suffix in (".html", ".js", ".css", ".svg")
        ):
            found = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", file.read_text("utf-8")))
            assert found <= {"http://www.w3.org"}, file


async def test_a_page_may_be_asked_for_its_head(door: Door) -> None:
    answer = await door.web.head("/docs")
    assert (answer.status_code, answer.content) == (200, b"")
