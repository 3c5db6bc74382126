"""Sluice: an MQTT broker with durable queues."""

from typing import Final

__version__: Final = "0.1.0"
