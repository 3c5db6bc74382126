"""Queue settings of the configuration: templates, and the rules of exclusive queues."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sluice.alerts import SsrfGuard
from sluice.config.settings import Settings
from sluice.errors import ConfigError, InvalidQueueConfig, SluiceError
from sluice.json_schema import find_schema_error
from sluice.placement import cell_of_queue
from sluice.queues.compacted import ExclusiveRules
from sluice.queues.model import QueueRules
from sluice.queues.service import (
    DEFAULT_PARTITIONS,
    QueueTemplates,
    Template,
    check_new_bindings,
    read_config,
)
from sluice.wire.topics import has_wildcard, matches

log = logging.getLogger(__name__)


def make_templates(settings: Settings) -> QueueTemplates:
    """Return the templates of the settings."""
    is_redis = settings.store not in ("embedded", "memory")
    partitions = settings.redis.partitions if is_redis else DEFAULT_PARTITIONS
    return QueueTemplates(
        matches, _read_templates(settings), settings.queues.auto_create, partitions
    )


def _read_templates(settings: Settings) -> list[Template]:
    return [
        Template(one.match, one.config, one.name, one.auto_create)
        for one in settings.queues.templates
    ]


def reload_templates(templates: QueueTemplates, read_settings: Callable[[], Settings]) -> None:
    """Read the configuration again and apply its templates; keep the present ones on an error.

    Other settings need a restart.
    """
    try:
        settings = read_settings()
        check_templates(settings, SsrfGuard(settings.webhooks.allow).fault_of_url)
    except SluiceError as error:
        log.error("queue templates not reloaded", extra={"reason": str(error)})
        return
    templates.replace(_read_templates(settings), settings.queues.auto_create)
    log.info("queue templates reloaded", extra={"templates": len(settings.queues.templates)})


def check_templates(settings: Settings, fault_of_webhook: Callable[[str], str]) -> None:
    """Refuse unusable templates at start, not when a client publishes to a matching queue."""
    names = [template.name for template in settings.queues.templates if template.name]
    if len(set(names)) < len(names):
        raise ConfigError(
            "queues.templates: two templates have the same name", "Give each a name of its own"
        )
    for template in settings.queues.templates:
        try:
            config = read_config(template.config, "any")
            check_new_bindings(config, None)
            rules = config.rules()
            fault = find_schema_error(rules.schema) if rules.schema else ""
            if not fault and rules.alert_webhook:
                fault = fault_of_webhook(rules.alert_webhook)
            if not fault and settings.cluster.coordinator != "off":
                fault = _find_misplaced_dlq(template.match, rules, settings.cluster.cells)
        except InvalidQueueConfig as error:
            fault = str(error)
        if fault:
            raise ConfigError(
                f"queues.templates: the one for {template.match!r} cannot be used: {fault}",
                "Correct the template",
            )


def _find_misplaced_dlq(match: str, rules: QueueRules, cells: int) -> str:
    """Return what is wrong with a template's dead-letter queue in a cluster, or an empty string.

    A message moves to its dead-letter queue in one commit of one store, so both queues must be in
    the same cell. `rules` are those of a queue named `any`.
    """
    matches_one_queue = not has_wildcard(match.encode())
    for name in (rules.dlq_name if rules.dlq_enabled else "", rules.invalid_queue_name):
        if not name or name == "dlq/any":
            continue
        if not matches_one_queue or cell_of_queue(name, cells) != cell_of_queue(match, cells):
            return (
                f"dlq_config names {name!r}, which is not in the cell of every queue that the "
                "template matches. Omit the name: dead letters then go to dlq/<queue>, which is in "
                "the "
                "cell of its queue"
            )
    return ""


def make_exclusive_rules(settings: Settings) -> ExclusiveRules:
    """Return the rules of exclusive queues. They get a quarter of the body cache."""
    ecq = settings.ecq
    rules = ExclusiveRules()
    rules.retention = ecq.retention
    rules.sweep_interval = ecq.sweep_interval
    rules.max_message_size = ecq.max_message_size
    rules.max_keys = ecq.max_keys
    rules.sync = ecq.durability == "sync"
    rules.cache_bytes = settings.queues.cache_bytes // 4
    return rules
