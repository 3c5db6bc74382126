"""What the commands that call a broker read from the environment."""

from typing import Final

# `serve` must not take them for settings.
CLIENT_VARIABLES: Final = frozenset(
    {
        "SLUICE_URL",
        "SLUICE_TOKEN",
        "SLUICE_TOKEN_FILE",
        "SLUICE_CA",
        "SLUICE_MQTT",
        "SLUICE_TRACEBACK",
    }
)
