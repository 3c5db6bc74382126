"""The REST models and the protobuf messages have the fields of the resources."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from sluice.admin import model
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.protobuf_responses import attribute_names
from sluice.admin.rest.schemas.json_models import json_type
from sluice.queues.service import views

RESOURCES: dict[type, Any] = {
    model.Ledger: pb.Ledger,
    model.Consumer: pb.Consumer,
    model.Group: pb.Group,
    views.HeldKey: pb.HeldKey,
    model.Partition: pb.Partition,
    model.Pause: pb.Pause,
    model.Queue: pb.QueueStats,
    model.QueueDetail: pb.Queue,
    model.Message: pb.Message,
    model.Owner: pb.Owner,
    model.Published: pb.PublishResponse,
    model.Redriven: pb.Redriven,
    model.Event: pb.Event,
    model.GroupState: pb.GroupState,
    model.MessageTrace: pb.Biography,
    model.Finding: pb.Finding,
    model.Diagnosis: pb.Diagnosis,
    model.Node: pb.Node,
    model.StoreGroup: pb.StoreGroup,
    model.StoreQueue: pb.StoreQueue,
    model.Store: pb.Store,
    model.Loss: pb.Loss,
    model.Caller: pb.Identity,
    model.ClusterNode: pb.ClusterNode,
    model.ClusterCell: pb.ClusterCell,
    model.Cluster: pb.Cluster,
}
MORE_IN_REST: dict[type, set[str]] = {model.Message: {"payload_base64", "correlation_data_base64"}}
# The cell of the requested queue, where REST has name, cell and owner.
MORE_IN_GRPC: dict[type, set[str]] = {model.Cluster: {"place"}}


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda kind: kind.__name__)
def test_model_has_every_field_of_its_resource(resource: type) -> None:
    shown = {field.name for field in dataclasses.fields(resource)}
    fields = json_type(resource).model_fields
    assert set(fields) == shown | MORE_IN_REST.get(resource, set())
    assert all(field.description for field in fields.values())


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda kind: kind.__name__)
def test_protobuf_message_has_every_field_of_its_resource(resource: type) -> None:
    fields = {field.name for field in RESOURCES[resource].DESCRIPTOR.fields}
    assert fields == set(attribute_names(resource)) | MORE_IN_GRPC.get(resource, set())


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda kind: kind.__name__)
def test_every_resource_of_a_field_is_checked(resource: type) -> None:
    for hint in get_type_hints(resource).values():
        for kind in (hint, *get_args(hint)):
            assert not dataclasses.is_dataclass(kind) or kind in {*RESOURCES, model.QueuePlace}
