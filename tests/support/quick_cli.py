"""The command line without its start, for tests that run it dozens of times: a process that has imported it forks for
each call. Importing costs more than most commands do.

`python quick_cli.py SOCKET` is the process; `python quick_cli.py SOCKET WORDS...` hands it words, folder, environment
and the three standard files, and ends with its exit code. Who sends it signals must start a command as ever.
"""

import json
import os
import signal
import socket
import sys


def serve(path: str) -> None:
    from sluice.cli import main  # what is dear

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # nobody asks for how they ended: they say so themselves
    print("ready", flush=True)
    while True:
        line, _ = listener.accept()
        if os.fork():
            line.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        reported, files, _, _ = socket.recv_fds(line, 1 << 20, 3)
        call = json.loads(reported)
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
        line.sendall(bytes([code if isinstance(code, int) else 1]))
        os._exit(0)


def call(path: str, words: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        reported = {"words": words, "folder": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(line, [json.dumps(reported).encode()], [0, 1, 2])
        return line.recv(1)[0]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(call(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
