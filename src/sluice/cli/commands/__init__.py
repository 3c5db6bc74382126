"""The commands, one module for each group of them. `add_to` of a module registers its commands."""

from sluice.cli.commands import access, bench, clients, configuration, ecq, groups, queues, worker
from sluice.cli.commands.messages import consume, dlq, peek, publish, schedules, waiting
from sluice.cli.commands.monitoring import diagnosis, losses, nodes, stores, top

__all__ = [
    "access",
    "bench",
    "clients",
    "configuration",
    "consume",
    "diagnosis",
    "dlq",
    "ecq",
    "groups",
    "losses",
    "nodes",
    "peek",
    "publish",
    "queues",
    "schedules",
    "stores",
    "top",
    "waiting",
    "worker",
]
