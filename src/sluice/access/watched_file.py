"""Files that an operator changes while the server runs.

They are read again when they have changed. They are written so that no other user can read them and
no crash leaves half a file.
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

CHECK_SECONDS: Final = 1.0  # between two checks of a file

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """The parsed content of a file. Thread-safe.

    `read` parses the text and raises ValueError with an explanation for invalid text. At start that
    is an error; later the last valid content stays in force and the log gives the reason.
    `check_change` receives the content in force, the new text and the new content, and raises
    ValueError likewise.
    """

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
        self._last_stat = _file_stat(path)
        self._next_check_at = clock() + CHECK_SECONDS
        self.version = 1
        try:
            self._content = read(_read_text(path))
        except (OSError, ValueError) as fault:
            raise ConfigError(
                f"{path} cannot be used: {_describe_error(fault)}", "Correct it, and start again"
            ) from None

    def current(self, check_now: bool = False) -> T:
        """Return the content; check for changes once a second, or now with `check_now`."""
        if check_now or self._clock() >= self._next_check_at:
            with self._lock:
                self._check_file()
        return self._content

    def _check_file(self) -> None:
        self._next_check_at = self._clock() + CHECK_SECONDS
        file_stat = _file_stat(self.path)
        if file_stat == self._last_stat:
            return
        self._last_stat = file_stat
        try:
            text = _read_text(self.path)
            content = self._read(text)
            if self._check_change is not None:
                self._check_change(self._content, text, content)
            self._content = content
        except (OSError, ValueError) as fault:
            log.error(
                "file rejected, previous content stays in force",
                extra={"file": self.path, "why": _describe_error(fault)},
            )
            return
        self.version += 1
        log.info("file read again", extra={"file": self.path})


def write_private(path: Path, text: str) -> None:
    """Replace the file atomically, readable by its owner only.

    When root writes it, the owner does not change: `sudo sluice user add` must not lock out a
    service that reads its users.
    """
    # mkstemp creates it with mode 0600
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
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


def warn_if_readable_by_others(path: Path) -> None:
    """Warn if other users can read the file: even hashes should stay private."""
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("file can be read by others: chmod 600 it", extra={"file": path})


def _file_stat(path: Path) -> tuple[int, int, int]:
    """Return values that change when a file is replaced or rewritten."""
    try:
        stat_result = path.stat()
    except OSError:
        return (0, 0, 0)
    return stat_result.st_mtime_ns, stat_result.st_size, stat_result.st_ino


def _read_text(path: Path) -> str:
    return path.read_text("utf-8")


def _describe_error(fault: Exception) -> str:
    """Describe an error without quoting the text, which may contain a secret."""
    if isinstance(fault, UnicodeDecodeError):
        return "it is not UTF-8"
    return (fault.strerror or str(fault)) if isinstance(fault, OSError) else str(fault)
