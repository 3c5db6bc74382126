"""A line that fails: stands between a client and a server on loopback, and holds, cuts and tears what passes."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class FaultProxy:
    def __init__(self, port: int, at: int = 0) -> None:
        """To `port`; listens at a port of its own, or at one that was given back."""
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", at))
        self.port = int(self._listener.getsockname()[1])
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._bytes_left = -1  # to the server, before all lines are cut; -1: no end to them
        self._closed = False
        threading.Thread(target=self._accept, name="fault-proxy", daemon=True).start()

    def hold(self) -> None:
        """Nothing gets through, and nobody is told."""
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """End every line, with whatever is under way in it."""
        with self._lock:
            lines, self._connections = self._connections, []
        for line in lines:
            _end(line)

    def redirect_to(self, port: int) -> None:
        """New connections go to another server, and those that there are end: a failover."""
        self._target = ("127.0.0.1", port)
        self.cut()

    def cut_after(self, count: int) -> None:
        """So many bytes get through to the server, then every line ends: in the midst of a command."""
        self._bytes_left = count

    def close(self) -> None:
        self._closed = True
        self._flows.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            line = (client, server)
            with self._lock:
                self._connections.append(line)
            threading.Thread(
                target=self._pump, args=(line, client, server, True), daemon=True
            ).start()
            threading.Thread(
                target=self._pump, args=(line, server, client, False), daemon=True
            ).start()

    def _pump(
        self,
        line: tuple[socket.socket, socket.socket],
        source: socket.socket,
        drain: socket.socket,
        up: bool,
    ) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                if up and 0 <= self._bytes_left <= len(data):
                    drain.sendall(data[: self._bytes_left])
                    self._bytes_left = -1
                    self.cut()
                    return
                if up and self._bytes_left > 0:
                    self._bytes_left -= len(data)
                drain.sendall(data)
        _end(line)


def _end(line: tuple[socket.socket, socket.socket]) -> None:
    for end in line:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
