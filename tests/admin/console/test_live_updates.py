"""Live updates of the console: figures, charts, a broker that stops and restarts, many queues."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from playwright.sync_api import expect

from tests.admin.console.conftest import Open, base_of
from tests.admin.console.kit import SECONDS, Peer, rest
from tests.support.broker_process import Broker, StartBroker

Connect = Callable[[Broker, str], Peer]


def test_new_broker_shows_instructions_and_the_first_message_adds_a_row(
    start_broker: StartBroker, open_console: Open, peer: Connect
) -> None:
    broker = start_broker(flags=["--store", "memory"])
    console = open_console(broker)
    console.open()
    expect(console.page.get_by_role("heading", name="No queues yet")).to_be_visible()
    taught = console.page.locator(".empty code").first.inner_text()
    console.screenshot("empty")
    address = f"-p {broker.mqtt.port}"
    assert taught == f"mosquitto_pub {address} -q 1 -t '$queue/tasks' -m 'resize cat.png'"
    peer(broker, "publisher").publish("tasks", b"resize cat.png")
    row = console.page.get_by_role("row", name="tasks")
    expect(row).to_be_visible()
    expect(row.locator("td").first).to_have_text("1")


def test_depth_chart_moves_while_a_client_publishes(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    publisher = peer(broker, "mover")
    publisher.publish("moving", b"first")
    console = open_console(broker)
    console.open_queue("moving")
    chart = console.page.locator("figure", has_text="Depth").first
    value = chart.locator(".value")
    expect(value).to_have_text("1")
    line = chart.locator("path.line")
    before = line.get_attribute("d")
    for nth in range(60):
        publisher.publish("moving", b"%d" % nth)
    expect(value).to_have_text("61")
    expect(line).not_to_have_attribute("d", before or "")
    # Upwards: the last point is higher on the screen than the first.
    heights = [
        float(point.split(",")[1]) for point in (line.get_attribute("d") or "")[1:].split("L")
    ]
    assert heights[-1] < heights[0]
    flow = console.page.locator("figure", has_text="Flow").locator(".value").first
    expect(flow).to_have_text(re.compile(r"[1-9]"))
    console.screenshot("queue")


def test_rate_is_drawn_from_the_second_sample_on(broker: Broker, open_console: Open) -> None:
    console = open_console(broker)
    console.open()
    drawn = console.page.evaluate(
        """async () => {
          const { History } = await import('/console/api/history.js');
          const history = new History();
          const node = { publishes_received: 0, publishes_sent: 0 };
          const rates = { enqueue_rate: 0, dequeue_rate: 0, ack_rate: 0 };
          const queue = { name: 'q', total_messages: 7, ...rates };
          history.add(node, [queue], 1000);
          history.add(node, [{ ...queue, ack_rate: 35 }], 2000);
          const of = (name, field) => history.of(name, field).map(([, value]) => value);
          const fields = ['total_messages', 'ack_rate'];
          return ['q', null].flatMap((name) => fields.map((field) => of(name, field)));
        }"""
    )
    assert drawn == [[7, 7], [35], [7, 7], [35]]


def test_page_of_a_missing_queue_follows_its_creation_and_deletion(
    broker: Broker, open_console: Open
) -> None:
    console = open_console(broker)
    console.allow("status of 404")
    page = console.page
    console.open_queue("phoenix", "/messages")
    expect(page.get_by_role("heading", name="There is no queue of this name")).to_be_visible()
    expect(page.get_by_role("button", name="Purge")).to_be_hidden()
    page.get_by_role("button", name="Publish a message").click()
    form = page.get_by_role("dialog")
    form.get_by_label("Payload").fill("ashes")
    form.get_by_role("button", name="Publish").click()
    expect(page.get_by_role("row", name="ashes")).to_be_visible()
    expect(page.get_by_role("button", name="Purge")).to_be_visible()
    console.live()
    rest(base_of(broker), "/queues/phoenix", method="DELETE")
    expect(page.get_by_role("heading", name="There is no queue of this name")).to_be_visible()
    rest(base_of(broker), "/queues/phoenix/messages", {"payload": "again"})
    expect(page.get_by_role("row", name="again")).to_be_visible()


def test_lost_connection_is_shown_and_recovers_with_the_broker(
    start_broker: StartBroker, open_console: Open, peer: Connect
) -> None:
    first = start_broker()
    peer(first, "before").publish("surviving", b"1")
    console = open_console(first)
    console.allow("ERR_|Failed to load")
    page = console.page
    console.open()
    console.live()
    first.stop()
    expect(page.locator("[data-link]")).to_have_text("Connection lost")
    expect(
        page.get_by_role("alert").filter(has_text="Connection to the broker lost.")
    ).to_be_visible()
    console.screenshot("lost", whole=False)
    again = start_broker(
        flags=["--http", first.facts["http"], "--data", str(first.folder / "data")]
    )
    console.live()
    expect(page.locator("[data-lost]")).to_be_hidden()
    peer(again, "after").publish("surviving", b"2")
    expect(page.get_by_role("row", name="surviving").locator("td").first).to_have_text("2")


def test_thousand_queues_are_paginated_and_filtered_and_updates_are_small(
    start_broker: StartBroker, open_console: Open, peer: Connect
) -> None:
    broker = start_broker(flags=["--store", "memory"])
    names = [f"tenant-{nth:04}/jobs" for nth in range(1000)]
    publisher = peer(broker, "many")
    publisher.publish_many(names, b"x")
    publisher.publish_many(["tenant-0777/jobs"] * 5, b"x")
    console = open_console(broker)
    page = console.page
    console.open()
    rows = page.locator("table.queues tbody tr")
    expect(rows).to_have_count(50)
    expect(page.locator(".pager")).to_contain_text("1\u201350 of 1,000")
    # One event of the stream changes figures of the visible rows and adds no row.
    changes, added = page.evaluate(
        """async () => {
          const { app } = await import('/console/app.js');
          const { QueueTable } = await import('/console/views/queues/queue_table.js');
          const table = new QueueTable(app);
          table.update();
          const watch = new MutationObserver(() => {});
          const everything =
            { subtree: true, childList: true, characterData: true, attributes: true };
          watch.observe(table.element, everything);
          for (const queue of app.queues.values()) queue.total_messages += 1;
          app.history.add(app.node, [...app.queues.values()]);
          table.update();
          const seen = watch.takeRecords();
          const nodes = seen.flatMap((one) => [...one.addedNodes]);
          const rows = nodes.filter((one) => one.nodeName === 'TR');
          return [seen.length, rows.length];
        }"""
    )
    assert 50 <= changes <= 50 * 10 and added == 0
    page.get_by_role("button", name="Depth").click()
    expect(rows.first).to_contain_text("tenant-0777/jobs")
    expect(page.get_by_role("columnheader", name="Depth")).to_have_attribute(
        "aria-sort", "descending"
    )
    console.screenshot("thousand", whole=False)
    page.get_by_label("Filter by name").fill("0042")
    expect(rows).to_have_count(1)
    page.get_by_label("Filter by name").fill("")
    page.get_by_role("button", name="Queue", exact=True).click()
    page.get_by_role("button", name="Next").click()
    expect(rows.first).to_contain_text("tenant-0050/jobs")


def test_stream_is_parsed_in_any_pieces_and_errors_find_their_field(
    broker: Broker, open_console: Open
) -> None:
    console = open_console(broker)
    console.open()
    events = console.page.evaluate(
        """async () => {
          const { EventParser } = await import('/console/api/live.js');
          const first = ': welcome\\n\\nevent: queues\\r\\ndata: {"a":\\ndata: 1}\\r\\n\\r\\n';
          const text = first + 'event: queue\\ndata: 2\\n\\n';
          const read = (size) => {
            const parser = new EventParser();
            const found = [];
            for (let at = 0; at < text.length; at += size)
              found.push(...parser.feed(text.slice(at, at + size)));
            return found.map(({ event, data }) => `${event}=${data}`);
          };
          return [1, 2, 3, 7, 1000].map(read);
        }"""
    )
    assert events == [['queues={"a":\n1}', "queue=2"]] * 5
    faults = console.page.evaluate(
        """async () => {
          const { faultsOf } = await import('/console/parts/config_fields.js');
          const paths = ['partitions', 'limits.retention', 'retry_policy.jitter'];
          const parse = (message) => {
            const { byField, rest } = faultsOf(message, paths);
            return [[...byField], rest];
          };
          return [
            parse("queue 'q' cannot be used: limits.retention 'x' is no time; write 5s;"
              + " partitions too many"),
            parse('partitions cannot shrink'),
            parse('the disk is full'),
          ];
        }"""
    )
    assert faults == [
        [[["limits.retention", "'x' is no time; write 5s"], ["partitions", "too many"]], []],
        [[["partitions", "cannot shrink"]], []],
        [[], ["the disk is full"]],
    ]


def test_charts_begin_with_the_samples_of_the_broker(broker: Broker, open_console: Open) -> None:
    console = open_console(broker)
    console.open()
    drawn = console.page.evaluate(
        """async () => {
          const { History } = await import('/console/api/history.js');
          const history = new History();
          const queue = { name: 'q', total_messages: 7, enqueue_rate: 0 };
          Object.assign(queue, { dequeue_rate: 0, ack_rate: 0 });
          const node = { name: 'local', publishes_received: 0, publishes_sent: 0 };
          history.backfill('q', [{ times: [100, 595, 600], total_messages: [1, 5, null] }]);
          history.backfill(null, [
            { times: [595], total_messages: [5] },
            { times: [596], total_messages: [2] },
          ]);
          history.add(node, [queue], 601000);
          return [history.of('q', 'total_messages'), history.of(null, 'total_messages')];
        }"""
    )
    assert drawn == [[[595000, 5], [601000, 7]], [[595000, 7], [601000, 7]]]


def test_sparklines_begin_with_the_samples_of_the_broker(
    broker: Broker, open_console: Open, peer: Connect
) -> None:
    peer(broker, "spark-author").publish("sparkling", b"x")
    deadline = time.monotonic() + SECONDS
    while len(rest(base_of(broker), "/queues/sparkling/samples")["times"]) < 3:
        assert time.monotonic() < deadline
    console = open_console(broker)
    console.open()
    line = console.page.get_by_role("row", name="sparkling").locator(".spark .line")
    # The last 90 seconds are 96 pixels wide; the samples of the page itself are at its end.
    # The page asks for ten queues with each update.
    expect(line).to_have_attribute("d", re.compile(r"M(\d|[0-7]\d|8[0-6])\.\d"), timeout=20_000)
