"""The REST models have the fields of the views."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import BaseModel

from sluice.admin import views
from sluice.admin.rest import models

PAIRS: list[tuple[type, type[BaseModel], set[str]]] = [
    (views.LedgerView, models.Ledger, set()),
    (views.ConsumerView, models.Consumer, set()),
    (views.GroupView, models.Group, set()),
    (views.PartitionView, models.Partition, set()),
    (views.QueueView, models.Queue, set()),
    (views.QueueDetail, models.QueueDetail, set()),
    (views.MessageView, models.Message, {"payload_base64", "correlation_data_base64"}),
    (views.Published, models.Published, set()),
    (views.Redriven, models.Redriven, set()),
    (views.Event, models.Event, set()),
    (views.GroupState, models.GroupState, set()),
    (views.MessageTrace, models.MessageTrace, set()),
    (views.Finding, models.Finding, set()),
    (views.Diagnosis, models.Diagnosis, set()),
    (views.NodeView, models.Node, set()),
]


@pytest.mark.parametrize(
    ("view", "model", "more"), PAIRS, ids=[view.__name__ for view, _, _ in PAIRS]
)
def test_model_has_every_field_of_its_view(
    view: type, model: type[BaseModel], more: set[str]
) -> None:
    shown = {field.name for field in dataclasses.fields(view)}
    assert set(model.model_fields) == shown | more
