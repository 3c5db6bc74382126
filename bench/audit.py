"""Measure an audit of many messages within bounded memory.

    python bench/audit.py --rows 10000000 --memory 1g

Spark first writes published, acknowledged and archived messages to Parquet files, which the audit
reads. Some messages are missing or duplicated, so the result can be checked. Prints rows, time, and
the peak memory of Java and this process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from sluice.bench.procfs import process_tree
from sluice.spark import session
from sluice.spark.pipelines.jobs import audit

EVERY = 100_000


def resident_mb(pid: int) -> float:
    """Return the peak resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rows", type=int, default=10_000_000)
    given.add_argument("--memory", default="1g")
    given.add_argument("--master", default="local[2,3]")
    wanted = given.parse_args()
    settings = {
        "spark.driver.memory": wanted.memory,
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "32",
    }
    spark = session("audit", wanted.master, **settings)
    ids = spark.range(wanted.rows).selectExpr(
        "id AS n", "concat('device-', id % 5000, '-message-', id) AS message_id"
    )
    with tempfile.TemporaryDirectory(prefix="sluice-audit-") as folder:
        began = time.monotonic()
        place = "'q' AS queue", "int(n % 10) AS partition", "n AS sequence"
        ids.select("message_id").write.parquet(f"{folder}/published")
        ids.where(f"n % {EVERY} <> 1").select("message_id").unionAll(
            ids.where(f"n % {EVERY} = 2").select("message_id")
        ).write.parquet(f"{folder}/acked")
        archived = ids.where(f"n % {EVERY} <> 3").unionAll(ids.where(f"n % {EVERY} = 4"))
        archived.selectExpr("message_id", *place).write.parquet(f"{folder}/archived")
        made = time.monotonic() - began
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.parquet"))
        sides = {
            name: audit.select_ids(spark.read.parquet(f"{folder}/{name}"))
            for name in ("published", "acked", "archived")
        }
        began = time.monotonic()
        verdict = audit.compare_sides(sides)
        taken = time.monotonic() - began
    odd = wanted.rows // EVERY
    expected = {
        "without an id": 0,
        "missing": odd,
        "not archived": odd,
        "never published": 0,
        "acked twice": odd,
        "archived twice": odd,
    }
    assert verdict.faults == expected, verdict.faults
    processes = {pid: resident_mb(pid) for pid in process_tree(os.getpid())}
    total = 3 * wanted.rows
    print(f"made {total:,} rows ({size / 1e6:,.0f} MB of Parquet) in {made:.1f} s")
    print(f"audited {total:,} rows in {taken:.1f} s: {total / taken:,.0f} rows/s; {verdict.faults}")
    print(
        f"peak resident memory: {sum(processes.values()):,.0f} MB"
        f" in {len(processes)} processes, heap {wanted.memory}"
    )
    spark.stop()


if __name__ == "__main__":
    main()
