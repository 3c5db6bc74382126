"""Schedules for the admin APIs: list, store, pause, run and remove those of a queue.

A schedule is in the engine of its queue, so every operation names the queue: in a cluster, the
request goes to the owner of the queue.
"""

from __future__ import annotations

from typing import Final

from sluice.admin import model
from sluice.admin.broker_facade import BrokerFacade, strip_queue_prefix
from sluice.admin.queries.publish_operation import collect_properties
from sluice.broker.namespaces import build_message
from sluice.errors import InvalidQueueConfig, InvalidQueueName, UnknownSchedule
from sluice.queues.names import queue_name_error
from sluice.queues.schedules import MISSED_NAMES, OUTCOME_NAMES, Run, Schedule
from sluice.queues.service import check_schedule_name, make_timing, show_pause
from sluice.units import format_duration

SHOWN_TICKS: Final = 5  # next ticks of a schedule


def list_schedules(facade: BrokerFacade, name: str = "") -> list[model.Schedule]:
    """Return the schedules of a queue, or of all queues, by name."""
    facade.sync_clock()
    found = facade.engine.schedules.by_name.values()
    return [
        _show(one)
        for one in sorted(found, key=_name_of)
        if not name or one.queue == strip_queue_prefix(name)
    ]


def find(facade: BrokerFacade, name: str, schedule: str) -> Schedule:
    facade.sync_clock()
    found = facade.engine.schedules.by_name.get(schedule)
    if found is None or found.queue != strip_queue_prefix(name):
        raise UnknownSchedule(schedule)
    return found


def show(facade: BrokerFacade, name: str, schedule: str) -> model.Schedule:
    return _show(find(facade, name, schedule))


async def store(
    facade: BrokerFacade, name: str, given: model.NewSchedule, by: str, replaces: bool
) -> model.Schedule:
    """Add a schedule, or replace times and message of an existing one."""
    queue = strip_queue_prefix(name)
    if fault := queue_name_error(queue):
        raise InvalidQueueName(queue, fault)
    check_schedule_name(given.name)
    outgoing = given.message
    if outgoing.message_id or outgoing.delay or outgoing.deliver_at:
        raise InvalidQueueConfig(
            "a schedule sets the id and the time of its messages",
            "Leave message_id, delay and deliver_at out",
        )
    now = facade.begin_change()
    schedules = facade.engine.schedules
    timing = make_timing(
        given.cron,
        given.every,
        given.time_zone,
        given.jitter,
        given.missed,
        now,
        schedules.min_interval_ms,
    )
    message = build_message(
        facade.queue_handler, queue, outgoing.payload, collect_properties(outgoing), 0.0
    )
    schedule = Schedule(given.name, queue, timing, message)
    schedule.ttl_ms = round(outgoing.expiry * 1000.0)
    schedule.changed_by = by
    if replaces:
        find(facade, name, given.name)
        schedules.replace(schedule)
    else:
        schedules.add(schedule)
    await facade.wait_committed()
    return _show(schedule)


async def remove(facade: BrokerFacade, name: str, schedule: str) -> None:
    found = find(facade, name, schedule)
    facade.begin_change()
    facade.engine.schedules.remove(found)
    await facade.wait_committed()


async def pause(
    facade: BrokerFacade, name: str, schedule: str, by: str, reason: str
) -> model.Schedule:
    found = find(facade, name, schedule)
    facade.begin_change()
    facade.engine.schedules.pause(found, by, reason)
    await facade.wait_committed()
    return _show(found)


async def resume(facade: BrokerFacade, name: str, schedule: str) -> model.Schedule:
    found = find(facade, name, schedule)
    facade.begin_change()
    facade.engine.schedules.resume(found)
    await facade.wait_committed()
    return _show(found)


async def run_now(facade: BrokerFacade, name: str, schedule: str) -> model.ScheduleRun:
    """Publish the message of a schedule now, apart from its ticks."""
    found = find(facade, name, schedule)
    facade.begin_change()
    run = facade.engine.schedules.run_now(found)
    await facade.wait_committed()
    return _show_run(run)


def _name_of(schedule: Schedule) -> str:
    return schedule.name


def _show(schedule: Schedule) -> model.Schedule:
    timing = schedule.timing
    template = schedule.template
    return model.Schedule(
        name=schedule.name,
        queue=schedule.queue,
        cron=timing.cron,
        every=format_duration(float(timing.every_ms) / 1000.0) if timing.every_ms else "",
        time_zone=timing.zone,
        jitter=format_duration(float(timing.jitter_ms) / 1000.0),
        missed=MISSED_NAMES[timing.missed],
        key=template.key.decode("utf-8", "replace"),
        size=len(template.payload),
        payload=template.payload,
        expiry=float(schedule.ttl_ms) / 1000.0,
        pause=show_pause(schedule.pause),
        fault=schedule.fault,
        next_runs=[tick / 1000.0 for tick in schedule.next_ticks(SHOWN_TICKS)],
        last_runs=[_show_run(run) for run in reversed(schedule.runs)],
        counts=dict(zip(OUTCOME_NAMES, schedule.counts, strict=True)),
        created_at=schedule.created_at,
        changed_by=schedule.changed_by,
    )


def _show_run(run: Run) -> model.ScheduleRun:
    return model.ScheduleRun(
        tick=float(run.tick_ms) / 1000.0,
        at=run.at,
        outcome=OUTCOME_NAMES[run.outcome],
        message_id=run.message_id.decode("utf-8", "replace"),
        detail=run.detail,
    )
