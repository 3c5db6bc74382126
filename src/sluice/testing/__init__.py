"""A broker for the tests of those who use Sluice: in memory, in the test's own process, under a clock the test moves.

    async def test_a_report_is_given_up_after_three_hours(sluice_broker):
        async with sluice_broker.working(app):
            await sluice_broker.publish("reports", {"id": 1})
            await sluice_broker.advance(hours=3)
        assert [letter.reason for letter in sluice_broker.dead_letters("reports")] == ["timeout"]

The fixture comes with the package: pytest finds it by itself.
"""

from sluice.testing.virtual_broker import Kept, VirtualBroker
from sluice.testing.virtual_time import VirtualTime

__all__ = ["Kept", "VirtualBroker", "VirtualTime"]
