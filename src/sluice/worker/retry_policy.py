"""The retry policy of a task's queue, as the worker declares it when it starts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sluice.client.payload_codecs import duration_text


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How failed jobs are retried. Settings that are left out stay as the queue has them.

    Durations are seconds or text such as "5m". The backoff before attempt n is
    `initial_backoff * backoff_multiplier ** (n - 2)`, at most `max_backoff`.
    """

    max_retries: int | None = None
    initial_backoff: float | str | None = None
    max_backoff: float | str | None = None
    backoff_multiplier: float | None = None
    total_timeout: float | str | None = None
    jitter: float | None = None

    def as_config(self) -> dict[str, object]:
        """Return the settings as the configuration of a queue has them."""
        config: dict[str, object] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None:
                continue
            is_duration = one.name in ("initial_backoff", "max_backoff", "total_timeout")
            config[one.name] = duration_text(one.name, value) if is_duration else value
        return config
