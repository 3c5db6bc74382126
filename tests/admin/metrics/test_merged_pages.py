"""The metrics page of a node with several processes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from sluice.admin.metrics import merge_pages

PAGE = """# HELP sluice_info 1.
# TYPE sluice_info gauge
sluice_info{{node="{name}"}} 1
# HELP mqtt_broker_connections Open connections.
# TYPE mqtt_broker_connections gauge
mqtt_broker_connections {connections}
# HELP sluice_store_up 1.
# TYPE sluice_store_up gauge
sluice_store_up {up}
# HELP sluice_cluster_nodes Nodes.
# TYPE sluice_cluster_nodes gauge
sluice_cluster_nodes 2
# HELP process_cpu_seconds_total CPU.
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total {cpu}
# HELP mqtt_queue_depth Messages.
# TYPE mqtt_queue_depth gauge
mqtt_queue_depth{{queue="$queue/{name}"}} 7
"""


def test_counts_are_added_and_facts_of_a_process_are_labelled() -> None:
    page = merge_pages(
        {
            "process-1": PAGE.format(name="one", connections=3, up=1, cpu=1.5),
            "process-2": PAGE.format(name="two", connections=4, up=0, cpu=2.25),
            "process-3": None,
        }
    )
    found = {
        (one.name, *sorted(one.labels.items())): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
    }
    assert found["mqtt_broker_connections",] == 7
    assert found["sluice_store_up",] == 0
    assert found["sluice_cluster_nodes",] == 2
    assert found["process_cpu_seconds_total", ("process", "process-1")] == 1.5
    assert found["process_cpu_seconds_total", ("process", "process-2")] == 2.25
    assert found["mqtt_queue_depth", ("queue", "$queue/one")] == 7
    assert found["sluice_process_up", ("process", "process-2")] == 1
    assert found["sluice_process_up", ("process", "process-3")] == 0
    assert page.count("# TYPE mqtt_broker_connections ") == 1
