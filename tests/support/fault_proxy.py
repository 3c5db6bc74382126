"""A proxy between a client and a server on loopback that delays, cuts and truncates data."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class FaultProxy:
    def __init__(self, port: int, at: int = 0) -> None:
        """Forward to `port`; listen on a free port, or on `at`."""
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", at))
        self.port = int(self._listener.getsockname()[1])
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._bytes_left = -1  # to the server, until all connections are cut; -1: no limit
        self._closed = False
        threading.Thread(target=self._accept, name="fault-proxy", daemon=True).start()

    def hold(self) -> None:
        """Stop forwarding, without closing connections."""
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Close every connection, with data in flight."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            _close(connection)

    def redirect_to(self, port: int) -> None:
        """Forward new connections to another server and close the existing ones: a failover."""
        self._target = ("127.0.0.1", port)
        self.cut()

    def cut_after(self, count: int) -> None:
        """Close every connection after `count` more bytes to the server, within a command."""
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
            connection = (client, server)
            with self._lock:
                self._connections.append(connection)
            threading.Thread(
                target=self._pump, args=(connection, client, server, True), daemon=True
            ).start()
            threading.Thread(
                target=self._pump, args=(connection, server, client, False), daemon=True
            ).start()

    def _pump(
        self,
        connection: tuple[socket.socket, socket.socket],
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
        _close(connection)


def _close(connection: tuple[socket.socket, socket.socket]) -> None:
    for end in connection:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
