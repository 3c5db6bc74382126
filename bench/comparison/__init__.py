"""Sluice beside other brokers: `bench/compare` is the command.

peers     who is there, what its acknowledgement means, how to get who is missing
running   one interleaved run with the load harness, and one of job queues
ratios    figures and ratios with their spread, from the raw lines
page      the tables, put into docs/performance.md between two marks
chart     the ratios as a picture
"""
