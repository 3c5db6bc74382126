"""Runs the command line without its import time, for tests that use it dozens of times.

A process that has imported it forks for each call, because the import takes longer than most
commands. `python quick_cli.py SOCKET` is that process. `python quick_cli.py SOCKET ARGUMENT...`
passes arguments, folder, environment and the three standard files to it, and ends with its exit
code. A command that receives signals must be started normally.
"""

import json
import os
import signal
import socket
import sys


def serve(path: str) -> None:
    from sluice.cli import main  # slow

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    # Exit codes of children are not collected: they send them over the socket.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        call = json.loads(request)
        os.chdir(call["folder"])
        os.environ.clear()
        os.environ.update(call["environ"])
        for number, file in enumerate(files):
            os.dup2(file, number)
        code: object = 0
        try:
            sys.argv = ["sluice", *call["words"]]
            main()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(bytes([code if isinstance(code, int) else 1]))
        os._exit(0)


def call(path: str, words: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = {"words": words, "folder": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        return connection.recv(1)[0]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(call(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
