"""The embedded store: a segmented commit log. FORMAT.md describes files and order of writes."""

from sluice.store.embedded.files import FileSystem
from sluice.store.embedded.layout import log_name
from sluice.store.embedded.store import EmbeddedStore

__all__ = [
    "EmbeddedStore",
    "FileSystem",
    "log_name",
]
