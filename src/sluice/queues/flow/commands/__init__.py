"""Commands on messages that wait: cancel, and find by the id of the publisher."""

from sluice.queues.flow.commands.id_search import IdSearches
from sluice.queues.flow.commands.message_commands import MessageCommands

__all__ = ["IdSearches", "MessageCommands"]
