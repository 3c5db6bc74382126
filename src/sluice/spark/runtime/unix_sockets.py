"""Java and its Python processes on one machine speak over Unix sockets: a twentieth less CPU for a read than over TCP,
and no port on which a stranger could try. The sockets lie in a directory that only this user may enter."""

from __future__ import annotations

import atexit
import shutil
import socket
import tempfile
from typing import Final

MAX_DIRECTORY_LENGTH: Final = (
    60  # characters of the directory: a socket's name takes 42 more, and the system takes 107
)
ENABLED_SETTING: Final = "spark.python.unix.domain.socket.enabled"
DIRECTORY_SETTING: Final = "spark.python.unix.domain.socket.dir"


def unix_socket_settings() -> dict[str, str]:
    """The settings for it; none where the system has no such sockets, or a place for them only far down."""
    if not hasattr(socket, "AF_UNIX"):
        return {}
    try:
        folder = tempfile.mkdtemp(prefix="sluice-spark-")  # its mode is 0700
    except OSError:
        return {}
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return (
        {ENABLED_SETTING: "true", DIRECTORY_SETTING: folder}
        if len(folder) <= MAX_DIRECTORY_LENGTH
        else {}
    )
