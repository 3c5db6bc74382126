"""The console and the documentation as the server sends them."""

from __future__ import annotations

import re
from pathlib import Path

import sluice
from tests.admin.rest.conftest import RestApi

OURS = Path(sluice.__file__).parent / "admin"


async def test_console_is_served_from_the_package(rest_api: RestApi) -> None:
    page = await rest_api.web.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in re.findall(r'(?:src|href)="(/console/[^"]+)"', page.text):
        part = await rest_api.web.get(path)
        assert part.status_code == 200, path
        assert part.headers["cache-control"] == "no-cache"


async def test_unchanged_page_is_not_sent_again(rest_api: RestApi) -> None:
    first = await rest_api.web.get("/docs")
    again = await rest_api.web.get("/docs", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_files_outside_the_pages_are_not_served(rest_api: RestApi) -> None:
    for path in (
        "/console/../service.py",
        "/console/%2e%2e/service.py",
        "/console/..%2fservice.py",
        "/docs//etc/passwd",
    ):
        answer = await rest_api.web.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["error"] == "no_such_page"


async def test_documentation_loads_only_local_resources(rest_api: RestApi) -> None:
    page = (await rest_api.web.get("/docs")).text
    parts = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert parts
    for part in parts:
        assert part.startswith("/"), part
        assert (await rest_api.web.get(part)).status_code == 200, part


def test_no_page_refers_to_another_host() -> None:
    """An address is only text or a namespace, never loaded."""
    for folder in (OURS / "console", OURS / "rest" / "docs"):
        for file in sorted(
            path for path in folder.rglob("*") if path.suffix in (".html", ".js", ".css", ".svg")
        ):
            found = set(
                re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", file.read_text("utf-8"))
            )
            assert found <= {"http://www.w3.org"}, file


async def test_head_request_for_a_page_is_answered(rest_api: RestApi) -> None:
    answer = await rest_api.web.head("/docs")
    assert (answer.status_code, answer.content) == (200, b"")
