"""Compare plain MQTT with mosquitto, interleaved: QoS 0 and 1, 1 to 1 and 4 to 4, 100 B and 1 KB.

    python bench/plain.py HARNESS --targets sluice,mosquitto --rounds 5 --baseline mosquitto

HARNESS is the folder of the load harness (mqload built in it). All further arguments go to its
compare.py; `--cases` defaults to the cases below. `sluice` is the command on the PATH, or $SLUICE.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CASES = {
    f"ps{qos}_{count}x{count}_{size}": [
        "pubsub",
        *("--qos", str(qos), "--pubs", str(count), "--subs", str(count), "--size", str(size)),
    ]
    for qos in (0, 1)
    for count in (1, 4)
    for size in (100, 1000)
}


def main() -> None:
    harness = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(harness))
    import compare

    compare.CASES.update({name: ("ps", arguments) for name, arguments in CASES.items()})
    command = os.environ.get("SLUICE", "sluice")
    serve = (
        f"{command} serve --mqtt 127.0.0.1:{{port}} --http 127.0.0.1:0 --grpc 127.0.0.1:0"
        " --data {dir}"
    )
    arguments = sys.argv[2:]
    if "--cases" not in arguments:
        arguments += ["--cases", ",".join(CASES)]
    sys.argv = ["compare.py", "--custom", f"sluice:22000:{serve}", *arguments]
    compare.main()


if __name__ == "__main__":
    main()
