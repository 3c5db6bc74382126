"""Turns the pages into a site: `site.py DIR`.

Plain HTML with a list of pages at its side, in the colours of the console, light and dark; no script, no search,
nothing from another host. Files lie as they do in the checkout, so a link between pages stays the link it is but for
its ending; what a page links to that is no page is copied along. The list at the side is the map of docs/README.md: a
page that is not on it is reached by links alone. markdown-it-py comes with rich, which the command line needs anyway.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
MAP = Path("docs/README.md")
CONSOLE = ROOT / "src/sluice/admin/console"

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · Sluice</title>
<link rel="icon" href="{up}site/icon.svg">
<link rel="stylesheet" href="{up}site/base.css">
<link rel="stylesheet" href="{up}site/site.css">
</head>
<body>
<nav aria-label="Pages">
<a class="home" href="{up}index.html"><img src="{up}site/icon.svg" alt="" width="24" height="24"> Sluice</a>
<details><summary>Pages</summary>{sidebar}</details>
<div class="wide">{sidebar}</div>
</nav>
<main>
{body}
</main>
{contents}
</body>
</html>
"""


def slug(heading: str) -> str:
    """The name of a heading in a link, as the sites that show these pages spell it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def text_of(token: Token) -> str:
    return "".join(
        part.content for part in token.children or [] if part.type in ("text", "code_inline")
    )


class Site:
    """Pages are named by their paths in the checkout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._markdown = MarkdownIt("commonmark").enable("table")
        self._todo = [MAP]
        self._seen: set[Path] = set()

    def make(self) -> int:
        """Write everything that can be reached from the map; how many pages that is."""
        shutil.rmtree(self._folder / "site", ignore_errors=True)
        (self._folder / "site").mkdir(parents=True)
        shutil.copy(CONSOLE / "css/base.css", self._folder / "site/base.css")
        shutil.copy(CONSOLE / "icon.svg", self._folder / "site/icon.svg")
        shutil.copy(Path(__file__).with_name("site.css"), self._folder / "site/site.css")
        pages = 0
        while self._todo:
            path = self._todo.pop()
            if path in self._seen:
                continue
            self._seen.add(path)
            if path.suffix == ".md" or (ROOT / path).is_dir():
                self._page(path)
                pages += 1
            else:
                target = self._folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, target)
        start = os.path.relpath(target_of(MAP))
        (self._folder / "index.html").write_text(
            f'<meta http-equiv="refresh" content="0; url={start}">\n', "utf-8"
        )
        return pages

    def _page(self, path: Path) -> None:
        tokens = self._markdown.parse(source_of(path))
        headings = list(self._dress(tokens, path))
        body = self._markdown.renderer.render(tokens, self._markdown.options, {})
        body = re.sub(
            r"<table>.*?</table>", r'<div class="table">\g<0></div>', body, flags=re.DOTALL
        )
        target = target_of(path)
        (self._folder / target).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / target).write_text(
            PAGE.format(
                title=html.escape(headings[0][1]),
                up="../" * (len(target.parts) - 1),
                sidebar=self._sidebar(path),
                body=body,
                contents=contents_of(headings),
            ),
            "utf-8",
        )

    def _dress(self, tokens: list[Token], path: Path) -> Iterator[tuple[str, str, str]]:
        """Give headings a name and links their way; yields level, text and name of each heading."""
        says = "text output"
        for place, token in enumerate(tokens):
            if token.type == "fence" and token.info == says:
                token.attrSet("class", "says")
                token.type = "code_block"  # drawn by the rule for plain code, which takes the class
            elif token.type == "heading_open":
                words = text_of(tokens[place + 1])
                token.attrSet("id", slug(words))
                if token.tag != "h1":
                    mark = Token(
                        "html_inline",
                        "",
                        0,
                        content=f'<a class="anchor" href="#{slug(words)}">#</a>',
                    )
                    (tokens[place + 1].children or []).append(mark)
                yield token.tag, words, slug(words)
            inside = token.children or []
            for nth, child in enumerate(inside):
                name = {"link_open": "href", "image": "src"}.get(child.type)
                if name:
                    link = str(child.attrs[name])
                    child.attrSet(name, self._link(link, path))
                    place = Path(link.partition("#")[0])
                    if place.suffix == ".md" and inside[nth + 1].content == place.name:
                        inside[nth + 1].content = title_of(path.parent / place)

    def _link(self, link: str, page: Path) -> str:
        place, mark, anchor = link.partition("#")
        if not place or re.match(r"[a-z]+:", place):
            return link
        base = page if (ROOT / page).is_dir() else page.parent
        path = Path(os.path.normpath(base / place))
        if not (ROOT / path).exists():
            raise SystemExit(f"{page} links to {link}, which is not there")
        self._todo.append(path)
        return os.path.relpath(target_of(path), target_of(page).parent) + mark + anchor

    def _sidebar(self, page: Path) -> str:
        """The map, less what stands beside each page."""
        parts: list[str] = []
        for section in re.split(r"^## ", source_of(MAP), flags=re.MULTILINE)[1:]:
            heading, _, text = section.partition("\n")
            rows = []
            for title, link in re.findall(r"\[([^\]]+)\]\(([^)]+\.md)\)", re.sub(r"`", "", text)):
                path = Path(os.path.normpath(MAP.parent / link))
                here = ' aria-current="page"' if path == page else ""
                way = self._link(
                    os.path.relpath(path, page if (ROOT / page).is_dir() else page.parent), page
                )
                name = html.escape(title.capitalize() if title.islower() else title)
                rows.append(f'<li><a href="{way}"{here}>{name}</a></li>')
            parts.append(f"<h2>{html.escape(heading)}</h2><ul>{''.join(rows)}</ul>")
        return "".join(parts)


def source_of(path: Path) -> str:
    """The Markdown of a page; of a folder, the list of what is in it."""
    if not (ROOT / path).is_dir():
        return re.sub(r"<!--.*?-->\n?", "", (ROOT / path).read_text("utf-8"), flags=re.DOTALL)
    lines = [f"# {path.name.capitalize()}", ""]
    for page in sorted((ROOT / path).glob("*.md")):
        title = page.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"* [{title}]({page.name})")
    return "\n".join(lines)


def title_of(path: Path) -> str:
    """What people are shown for a link that shows the name of a page's file."""
    return source_of(Path(os.path.normpath(path))).partition("\n")[0].removeprefix("# ")


def target_of(path: Path) -> Path:
    """Where a page is written to, below the folder of the site; other files keep their place."""
    if (ROOT / path).is_dir():
        return path / "index.html"
    return path.with_suffix(".html") if path.suffix == ".md" else path


def contents_of(headings: list[tuple[str, str, str]]) -> str:
    rows = [
        f'<li><a href="#{name}">{html.escape(words)}</a></li>'
        for tag, words, name in headings
        if tag == "h2"
    ]
    if len(rows) < 2:
        return ""
    return f'<aside aria-label="On this page"><h2>On this page</h2><ul>{"".join(rows)}</ul></aside>'


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: site.py DIR")
    folder = Path(sys.argv[1]).resolve()
    print(f"wrote {Site(folder).make()} pages to {folder}")


if __name__ == "__main__":
    main()
