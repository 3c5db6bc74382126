"""Connections of the client: dialing, reconnecting, and handing over what arrives."""

from sluice.client.net.conditions import ConditionWaiters
from sluice.client.net.confirm import Confirm, NowaitConfirm, UnseenFailures, wait_done
from sluice.client.net.dispatcher import TopicDispatcher
from sluice.client.net.portal import Portal
from sluice.client.net.receive_buffer import Messages, ReceiveBuffer
from sluice.client.net.reconnector import Reconnector

__all__ = [
    "ConditionWaiters",
    "Confirm",
    "Messages",
    "NowaitConfirm",
    "Portal",
    "ReceiveBuffer",
    "Reconnector",
    "TopicDispatcher",
    "UnseenFailures",
    "wait_done",
]
