"""Files that people change while the server runs: read again when they have changed, written so that nobody else reads
them and no crash leaves half of one.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from sluice.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0  # between two looks at a file

T = TypeVar("T")


class Watched(Generic[T]):
    """What `read` makes of a file's text. `read` raises ValueError, with words, for text that it cannot use: at the
    start that is a refusal, later the last good content stays in force and the log says why. Any thread may ask.
    `check_change` is given the content in force and the new text and content, and raises ValueError likewise."""

    def __init__(
        self,
        path: Path,
        read: Callable[[str], T],
        clock: Callable[[], float] = time.monotonic,
        check_change: Callable[[T, str, T], None] | None = None,
    ) -> None:
        self.path = path
        self._read = read
        self._clock = clock
        self._check_change = check_change
        self._lock = threading.Lock()
        self._seen = _mark(path)
        self._next_look = clock() + LOOK_SECONDS
        self.version = 1
        try:
            self._content = read(_text_of(path))
        except (OSError, ValueError) as fault:
            raise ConfigError(
                f"{path} cannot be used: {_words(fault)}", "Correct it, and start again"
            ) from None

    def current(self, now: bool = False) -> T:
        """The content; at most once a second, or with `now`, after a look whether the file has changed."""
        if now or self._clock() >= self._next_look:
            with self._lock:
                self._look()
        return self._content

    def _look(self) -> None:
        self._next_look = self._clock() + LOOK_SECONDS
        mark = _mark(self.path)
        if mark == self._seen:
            return
        self._seen = mark
        try:
            text = _text_of(self.path)
            content = self._read(text)
            if self._check_change is not None:
                self._check_change(self._content, text, content)
            self._content = content
        except (OSError, ValueError) as fault:
            log.error(
                "file not taken, the one before stays in force",
                extra={"file": self.path, "why": _words(fault)},
            )
            return
        self.version += 1
        log.info("file read again", extra={"file": self.path})


def write_private(path: Path, text: str) -> None:
    """Put `text` in the place of the file at once, readable by its owner only. When root does it, the owner stays who
    it was: a service that may read its users must not be locked out by `sudo sluice user add`."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mkstemp makes it 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if os.geteuid() == 0 and path.exists():
                owner = path.stat()
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def warn_if_open(path: Path) -> None:
    """Hashes are no secrets of the first order, and still nobody else's business."""
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("file can be read by others: chmod 600 it", extra={"file": path})


def _mark(path: Path) -> tuple[int, int, int]:
    """What differs when a file has been replaced or rewritten."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _text_of(path: Path) -> str:
    return path.read_text("utf-8")


def _words(fault: Exception) -> str:
    """Never the text itself: it may hold a secret."""
    if isinstance(fault, UnicodeDecodeError):
        return "it is not UTF-8"
    return (fault.strerror or str(fault)) if isinstance(fault, OSError) else str(fault)
