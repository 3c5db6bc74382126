"""The payload with which a dead letter goes back, from a file."""

from __future__ import annotations

import base64
from pathlib import Path

from sluice.cli.support import CommandError, usage_error


def read_edited_payload(file: Path | None, is_for_one: bool) -> dict[str, object]:
    """Return the fields of a retry that replace the payload; empty without a file."""
    if file is None:
        return {}
    if not is_for_one:
        raise usage_error(
            "--payload-file is for one dead letter", "Name it: sluice dlq retry QUEUE ID"
        )
    try:
        content = file.read_bytes()
    except OSError as fault:
        raise CommandError(
            f"cannot read {file}: {fault.strerror}", "Give --payload-file a file that you may read"
        ) from None
    return {"payload_base64": base64.b64encode(content).decode()}
