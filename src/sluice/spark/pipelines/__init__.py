"""Ready-made pipelines: what people do with queues and Spark, as one command each.

Every pipeline is a module: a plain function on DataFrames that says what it does, and an entry that reads from the
broker and writes the result. `sluice pipeline <name>`, by itself or under spark-submit, calls the
entry. docs/pipelines.md has a section for each.

    archive       a queue into a Delta table or Parquet files, each message once
    dead_letters  what fails, why, and since when
    redrive       repair dead letters with SQL and put them back
    transform     a queue into a queue, with SQL or a function
    replay        an archive back into a queue
    compact       the last value of each key
    flow          throughput and latency per window of time
    audit         what was published against what became of it: what is missing, what is double

Beside them: `tables` (Delta and Parquet), `queues` (reading from and writing to the broker), `running` (a stream from
its start to its end), `windows` and `spans` (of time, added up), `report/` (HTML and charts).
"""
