"""Consumers of plain topics with dead letters."""

from sluice.client.topics.dead_letter_envelope import DeadLetter, read_dead_letter
from sluice.client.topics.handler_loop import UnacceptableLimitReached
from sluice.client.topics.rejections import Rejections
from sluice.client.topics.replay import ReplayResult, replay_dead_letters
from sluice.client.topics.subscription import (
    Subscription,
    SupportsDeadLetters,
    SupportsInvalidMessages,
    TopicSubscription,
)
from sluice.client.topics.topic_consumer import ConsumerFactory, TopicConsumer

__all__ = [
    "ConsumerFactory",
    "DeadLetter",
    "Rejections",
    "ReplayResult",
    "Subscription",
    "SupportsDeadLetters",
    "SupportsInvalidMessages",
    "TopicConsumer",
    "TopicSubscription",
    "UnacceptableLimitReached",
    "read_dead_letter",
    "replay_dead_letters",
]
