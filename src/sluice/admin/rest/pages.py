"""The pages: the console at `/`, the documentation at `/docs`; static files of the package.

No page loads anything from another host. Files have an ETag and are revalidated each time
(`no-cache`): their names have no version, and an old script with a new server is worse than a small
request.
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

# The system's types differ between machines, and a browser does not run a script of a wrong type.
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
