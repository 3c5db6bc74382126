"""Simulates a user at a terminal, for commands of a page that are interactive or endless.

    python terminal_user.py COMMAND...            types a password, or yes, when asked
    python terminal_user.py --ends 1 COMMAND...   presses Ctrl-C after output on stdout (2: stderr)

The command has a terminal as stdin and stderr; its stdout is ours, which may be a pipe.
"""

import os
import pty
import selectors
import signal
import sys

PASSWORD = b"correct horse battery\n"


def main(ends: int, command: list[str]) -> int:
    reading, writing = os.pipe()
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it
        os.dup2(writing, 1)
        os.execvp(command[0], command)
    os.close(writing)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    asked, pressed = b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ, 1)
        selector.register(terminal, selectors.EVENT_READ, 2)
        while selector.get_map():
            for key, _ in selector.select():
                try:
                    output = os.read(key.fd, 65536)
                except OSError:  # Linux: the other side of the terminal is closed
                    output = b""
                if not output:
                    selector.unregister(key.fd)
                    continue
                os.write(key.data, output)
                if ends == key.data and not pressed:
                    pressed = True
                    os.write(terminal, b"\x03")
                if key.data == 2:
                    asked += output
                    if asked.rstrip(b" ").endswith(b":"):
                        os.write(terminal, b"y\n" if b"[y/N]" in asked else PASSWORD)
                        asked = b""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 0 if pressed and code in (130, -signal.SIGINT) else abs(code)


if __name__ == "__main__":
    words = sys.argv[1:]
    given = words[0] == "--ends"
    sys.exit(main(int(words[1]) if given else 0, words[2:] if given else words))
