"""The benchmark: how fast this broker is on this machine, and whether every message came once and in order.

    scenarios ──▶ conducting ──▶ generator processes (generator, traffic, tally) ──▶ the broker (target)
                      └──▶ measuring ──▶ results ──▶ picture

It speaks MQTT like any client, on the wire code alone, and knows nothing of the broker's inside.
"""
