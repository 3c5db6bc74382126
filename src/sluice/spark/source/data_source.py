"""What Spark meets: the format `sluice`. It reads options and hands over to the readers and writers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from uuid import uuid4

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from sluice.spark.source import planner
from sluice.spark.source.columns import check_read, check_written, usual_schema
from sluice.spark.http.bulk_client import Door
from sluice.spark.errors import InvalidOption
from sluice.spark.runtime.gc_freeze import leave_out_imports
from sluice.spark.source.source_options import read_options, write_options
from sluice.spark.source.batch_reader import BatchReader, NarrowingReader
from sluice.spark.source.stream_reader import StreamReader
from sluice.spark.source.sink import ONCE, BatchWriter, StreamWriter

PATIENCE: Final = 5.0  # seconds for the first question: a wrong url should not take a minute to find out


class SluiceSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "sluice"

    def schema(self) -> StructType:
        """Asked when the user gives none: dead letters have columns of their own."""
        leave_out_imports()
        options = read_options(self.options, streaming=False)
        hurried = replace(options.where, retry_seconds=min(options.where.retry_seconds, PATIENCE))
        with Door(hurried) as door:
            found = planner.look(door, options)
        return usual_schema(options.headers, any(seen.dead_letters for seen in found.values()))

    def reader(self, schema: StructType) -> BatchReader:
        leave_out_imports()
        options = read_options(self.options, streaming=False)
        return (NarrowingReader if options.pushdown else BatchReader)(options, check_read(schema))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 Spark's name, as below
        return StreamReader(read_options(self.options, streaming=True), check_read(schema))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise InvalidOption("a queue cannot be overwritten", 'Say mode("append")')
        options = write_options(self.options, streaming=False)
        app = options.fence() if options.app else f"{ONCE}{uuid4()}"
        return BatchWriter(options, check_written(schema, options.queue), app)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        if overwrite:
            raise InvalidOption("a queue cannot be overwritten", 'Say outputMode("append")')
        options = write_options(self.options, streaming=True)
        return StreamWriter(options, check_written(schema, options.queue))
