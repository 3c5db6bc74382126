"""Limits how often the same refusal is logged: callers repeat their attempts each second.

The memory for it is limited as well, because a caller chooses the name that it claims.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

INTERVAL_SECONDS: Final = 30.0
MAX_ENTRIES: Final = 64
MAX_NAME_LENGTH: Final = 200


class RefusalLog:
    """Logs an event once per interval for each node and reason."""

    def __init__(self, event: str, clock: Callable[[], float]) -> None:
        self._event = event
        self._clock = clock
        self._logged_at: dict[tuple[str, str], float] = {}
        self._suppressed = 0

    def log(self, node: str, address: str, reason: str, level: int = logging.WARNING) -> None:
        now = self._clock()
        key = (node[:MAX_NAME_LENGTH], reason)
        if len(self._logged_at) >= MAX_ENTRIES or key in self._logged_at:
            self._logged_at = {
                one: at for one, at in self._logged_at.items() if now - at < INTERVAL_SECONDS
            }
        if key in self._logged_at or len(self._logged_at) >= MAX_ENTRIES:
            self._suppressed += 1
            return
        self._logged_at[key] = now
        fields: dict[str, object] = {"node": key[0], "address": address, "reason": reason}
        if self._suppressed:
            fields["suppressed"] = self._suppressed  # since the last such line
            self._suppressed = 0
        log.log(level, self._event, extra=fields)
