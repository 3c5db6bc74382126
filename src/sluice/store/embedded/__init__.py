"""The embedded store: a segmented commit log. FORMAT.md describes files and order of writes."""

from sluice.store.embedded.files import FileSystem, write_file_atomically
from sluice.store.embedded.layout import LOCK_FILE, DirectoryListing, log_name
from sluice.store.embedded.store import EmbeddedStore

__all__ = [
    "LOCK_FILE",
    "DirectoryListing",
    "EmbeddedStore",
    "FileSystem",
    "log_name",
    "write_file_atomically",
]
