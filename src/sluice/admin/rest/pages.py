"""The pages: the console at `/`, the documentation at `/docs`. Files of the package, sent as they are.

No page loads anything from another host. Files carry an ETag and are asked about again each time (`no-cache`): they
have no version in their names, and an old script with a new server is worse than one small question.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

HERE: Final = Path(__file__).parent
CONSOLE: Final = HERE.parent / "console"
DOCS: Final = HERE / "docs"

# What the system says of these differs from machine to machine, and a wrong type is not run by a browser.
for kind, ending in (("text/javascript", ".js"), ("text/css", ".css"), ("image/svg+xml", ".svg")):
    mimetypes.add_type(kind, ending)


class RevalidatedFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers["Cache-Control"] = "no-cache"
        return answer


def install_pages(app: FastAPI) -> None:
    console = RevalidatedFiles(directory=CONSOLE, check_dir=False)
    docs = RevalidatedFiles(directory=DOCS)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return await console.get_response("index.html", request.scope)

    @app.get("/docs", include_in_schema=False)
    async def documentation(request: Request) -> Response:
        return await docs.get_response("index.html", request.scope)

    app.mount("/console", console)
    app.mount("/docs", docs)
