"""The embedded store: a segmented commit log. FORMAT.md tells what is on disk and why in that order."""

from sluice.store.embedded.files import FileSystem
from sluice.store.embedded.store import EmbeddedStore

__all__ = ["EmbeddedStore", "FileSystem"]
