"""Responses of one node with several processes: each process answers, and one response leaves.

In a cluster these requests are about the node that answers. The processes of one node have them in
common: counts are added, and the node is as healthy as its least healthy process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from sluice.admin.metrics import merge_pages

# What each process has answered, by name; None: it did not answer.
Pages = Mapping[str, bytes | None]
NODE_NAME: Final = "local"  # as of a node with one process


def _merge_metrics(pages: Pages) -> bytes:
    texts = {name: None if page is None else page.decode() for name, page in pages.items()}
    return merge_pages(texts).encode()


def _merge_node(pages: Pages) -> bytes:
    return json.dumps({**_add(pages), "name": NODE_NAME}).encode()


def _merge_store(pages: Pages) -> bytes:
    return json.dumps(_add(pages)).encode()


def _add(pages: Pages) -> dict[str, Any]:
    """Add the numbers and lists of JSON objects; everything else is that of the first."""
    combined: dict[str, Any] = {}
    for page in pages.values():
        for key, value in json.loads(page).items() if page is not None else ():
            known = combined.get(key)
            if known is None:
                combined[key] = value
            elif isinstance(value, bool):
                combined[key] = known and value if key == "healthy" else known or value
            elif isinstance(value, int):
                combined[key] = known + value
            elif isinstance(value, list):
                combined[key] = known + [one for one in value if one not in known]
            elif key == "fault":
                combined[key] = known or value
    return combined


MERGED_PATHS: Final[dict[str, Callable[[Pages], bytes]]] = {
    "/metrics": _merge_metrics,
    "/api/v1/node": _merge_node,
    "/api/v1/store": _merge_store,
}
READY_PATH: Final = "/readyz"
