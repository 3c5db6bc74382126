"""Builds HTML and SVG. A plain string is text and is escaped; only `element` creates markup.

Reports show payloads, ids and error texts that any client may have published. So there is no way to
insert a string into a page as markup, not even by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final, TypeAlias

_VOID_TAGS: Final = frozenset({"meta", "br", "hr"})


class Markup:
    """A finished part of a page."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


Piece: TypeAlias = "Markup | str | Iterable[Piece] | None"


def element(tag: str, *children: Piece, **attributes: object) -> Markup:
    """Return an element: `class_` is class, `stroke_width` is stroke-width, None is omitted."""
    attribute_text = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_format_value(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID_TAGS:
        return Markup(f"<{tag}{attribute_text}>")
    return Markup(f"<{tag}{attribute_text}>{_render(children)}</{tag}>")


def _render(piece: Piece) -> str:
    if piece is None:
        return ""
    if isinstance(piece, Markup):
        return piece.text
    if isinstance(piece, str):
        return escape(piece, quote=False)
    return "".join(_render(one) for one in piece)


def _format_value(value: object) -> str:
    """Round coordinates to a tenth, which keeps a page with a thousand bars small."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
