"""Limits apply to a node as a whole, and templates must be possible in a cluster."""

from __future__ import annotations

import pytest

from sluice.broker.limits import Limits
from sluice.client import ConnectRefused
from sluice.config.queue_settings import check_templates
from sluice.config.settings import Settings
from sluice.errors import ConfigError
from tests.cluster.memory_cluster import client_in, two_nodes


def settings_with(match: str, **dlq: object) -> Settings:
    return Settings.model_validate(
        {
            "store": "redis://127.0.0.1:6379",
            "cluster": {"coordinator": "redis", "node": "one", "cells": 60},
            "queues": {"templates": [{"match": match, "config": {"dlq_config": dlq}}]},
        }
    )


@pytest.mark.parametrize("wrong", [{"topic": "failures"}, {"invalid_topic": "bad"}])
@pytest.mark.parametrize("match", ["orders/#", "orders"])
def test_template_with_dead_letters_in_another_cell_is_refused_at_start(
    match: str, wrong: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="Omit the name: dead letters then go to dlq/<queue>"):
        check_templates(settings_with(match, **wrong), lambda url: "")


@pytest.mark.parametrize(
    ("match", "dlq"),
    [("orders/#", {}), ("orders", {"topic": "dlq/orders", "invalid_topic": "dlq/dlq/orders"})],
)
def test_template_with_dead_letters_in_the_cell_of_their_queue_is_accepted(
    match: str, dlq: dict[str, str]
) -> None:
    check_templates(settings_with(match, **dlq), lambda url: "")


async def test_connections_are_counted_over_all_cells_of_a_node() -> None:
    """A node counts the sessions in its cells, wherever their clients are connected."""
    limits = Limits()
    limits.max_connections = 2
    async with (
        two_nodes(limits=limits) as net,
        net.nodes["a"].client(client_in(0)),
        net.nodes["b"].client(client_in(2), session_expiry=60),  # at node a too
        net.nodes["a"].client(client_in(1), session_expiry=60),  # at node b
    ):
        with pytest.raises(ConnectRefused, match="this server has reached its limit of 2 clients"):
            await net.nodes["a"].client(client_in(3)).connect()  # lives where it is connected
        async with net.nodes["b"].client(client_in(4)):
            pass
