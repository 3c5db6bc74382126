"""Compare Sluice with other brokers; `bench/compare` is the command.

peers     which peers are installed, what their acknowledgements mean, how to install others
running   one interleaved run with the load harness, and one of job queues
ratios    figures and ratios with their spread, from the raw lines
page      the tables, inserted into docs/performance.md between two marks
chart     the ratios as a chart
"""
