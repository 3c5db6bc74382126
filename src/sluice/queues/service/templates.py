"""Queue templates: the configuration that a new queue starts from, by a pattern for its name.

A template applies to every new queue of every API; a call overrides it key by key.
Existing queues never change when the templates do. This module does not know the syntax of
patterns: `matches` compares a pattern with a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sluice.errors import InvalidQueueConfig
from sluice.queues.model import QueueRules
from sluice.queues.service.queue_config import (
    DEFAULT_PARTITIONS,
    QueueConfig,
    merge_config,
    read_config,
)


class Template:
    """A configuration without `name`. `auto_create` is None if the server's setting decides."""

    def __init__(
        self,
        match: str,
        config: Mapping[str, object],
        name: str = "",
        auto_create: bool | None = None,
    ) -> None:
        self.match: str = match
        self.config: Mapping[str, object] = config
        self.name: str = name
        self.auto_create: bool | None = auto_create


class QueueTemplates:
    """The templates of a broker; of several that match, the first applies."""

    def __init__(
        self,
        matches: Callable[[bytes, bytes], bool],
        templates: Sequence[Template] = (),
        auto_create: bool = True,
        default_partitions: int = DEFAULT_PARTITIONS,
    ) -> None:
        self._matches = matches
        self._templates: Sequence[Template] = templates
        self._auto_create: bool = auto_create
        self._default_partitions: int = default_partitions

    def replace(self, templates: Sequence[Template], auto_create: bool) -> None:
        """Use other templates for queues that are created from now on."""
        self._templates = templates
        self._auto_create = auto_create

    def creates_on_use(self, name: str) -> bool:
        """Return whether a publish or a subscription may create this queue."""
        template = self._find_match(name)
        if template is None or template.auto_create is None:
            return self._auto_create
        return template.auto_create

    def rules_for(self, name: str) -> tuple[QueueRules, str]:
        """Return the rules and the configuration of a queue that is created by its first use."""
        template = self._find_match(name)
        config = read_config(
            {} if template is None else template.config,
            name,
            default_partitions=self._default_partitions,
        )
        return config.rules(), config.as_json()

    def read(self, given: object) -> QueueConfig:
        """Read the configuration of a new queue, with its name, on top of its template.

        The key `template` names a template that applies instead of the first match.
        """
        if not isinstance(given, Mapping):
            return read_config(given)  # refuses it
        values = dict(given)
        template = self._choose(values.pop("template", None), values.get("name"))
        if template is not None:
            values = merge_config(template.config, values)
        return read_config(values, default_partitions=self._default_partitions)

    def _choose(self, template_name: object, queue_name: object) -> Template | None:
        if template_name is None:
            is_text = isinstance(queue_name, str)
            return self._find_match(str(queue_name).removeprefix("$queue/")) if is_text else None
        names: list[str] = []
        for template in self._templates:
            if template.name:
                if template.name == template_name:
                    return template
                names.append(template.name)
        raise InvalidQueueConfig(
            f"template is {template_name!r}, and there is no template of this name",
            f"Use one of {', '.join(names)}" if names else "Name a template by its key `name`",
        )

    def _find_match(self, name: str) -> Template | None:
        encoded = name.encode("utf-8", "surrogatepass")
        for template in self._templates:
            if self._matches(template.match.encode(), encoded):
                return template
        return None
