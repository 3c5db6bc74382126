"""A broker for the tests of applications: in memory, in the test's process, with a virtual clock.

    async def test_a_report_is_given_up_after_three_hours(sluice_broker):
        async with sluice_broker.working(app):
            await sluice_broker.publish("reports", {"id": 1})
            await sluice_broker.advance(hours=3)
        assert [dead.reason for dead in sluice_broker.dead_letters("reports")] == ["timeout"]

The package registers the fixture: pytest finds it without configuration.
"""

from sluice.testing.virtual_broker import StoredMessage, VirtualBroker
from sluice.testing.virtual_time import VirtualTime

__all__ = ["StoredMessage", "VirtualBroker", "VirtualTime"]
