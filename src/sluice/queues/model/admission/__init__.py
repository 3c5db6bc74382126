"""Which deliveries are admitted now: pauses, the breaker, and limits of a group and of its keys."""

from sluice.queues.model.admission.key_limits import KeyLimits
from sluice.queues.model.admission.policies import (
    BREAKER_NAMES,
    CLOSED,
    NOT_PAUSED,
    Admission,
    Pause,
)

__all__ = ["BREAKER_NAMES", "CLOSED", "NOT_PAUSED", "Admission", "KeyLimits", "Pause"]
