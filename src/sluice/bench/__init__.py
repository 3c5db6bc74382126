"""The benchmark: how fast the broker is on this machine, and whether every message came once and in
order.

    scenarios -> measurement -> generator processes (generator, traffic, tally) -> the broker
                     |                                                       (measured_broker)
                     +-> procfs -> results -> chart

It speaks MQTT like any client, uses only the wire package, and knows nothing of the broker's
internals.
"""
