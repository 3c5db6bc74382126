"""Commands on messages that wait: cancel, reschedule, find by the id of the publisher."""

from sluice.queues.flow.commands.id_search import IdSearches
from sluice.queues.flow.commands.message_commands import (
    MessageCommands,
    load_rescheduled,
    write_rescheduled,
)

__all__ = ["IdSearches", "MessageCommands", "load_rescheduled", "write_rescheduled"]
