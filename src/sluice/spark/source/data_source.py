"""The format `sluice` that Spark loads. It parses options and creates the readers and writers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final
from uuid import uuid4

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from sluice.spark.errors import InvalidOption
from sluice.spark.http import BulkClient
from sluice.spark.runtime import freeze_imports
from sluice.spark.source import planner
from sluice.spark.source.batch_reader import BatchReader
from sluice.spark.source.columns import (
    check_read_schema,
    check_write_schema,
    default_schema,
    schema_of_option,
)
from sluice.spark.source.sink import BatchWriter, StreamWriter
from sluice.spark.source.source_options import ONE_OFF_PREFIX, read_options, write_options
from sluice.spark.source.stream_reader import StreamReader

# For the first request, in seconds: a wrong url should be reported quickly.
SCHEMA_RETRY_SECONDS: Final = 5.0


class SluiceSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "sluice"

    def schema(self) -> StructType:
        """Return the schema if the user gives none: dead letters have additional columns."""
        freeze_imports()
        options = read_options(self.options, streaming=False)
        short_retry = replace(
            options.where, retry_seconds=min(options.where.retry_seconds, SCHEMA_RETRY_SECONDS)
        )
        with BulkClient(short_retry) as client:
            found = planner.find_offsets(client, options)
        if options.columns:
            return schema_of_option(options.columns)
        return default_schema(options.headers, any(seen.dead_letters for seen in found.values()))

    def reader(self, schema: StructType) -> BatchReader:
        freeze_imports()
        options = read_options(self.options, streaming=False)
        return BatchReader(options, check_read_schema(schema, options.columns))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        options = read_options(self.options, streaming=True)
        return StreamReader(options, check_read_schema(schema, options.columns))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise InvalidOption("a queue cannot be overwritten", 'Say mode("append")')
        options = write_options(self.options, streaming=False)
        app = options.transaction_app() if options.app else f"{ONE_OFF_PREFIX}{uuid4()}"
        return BatchWriter(options, check_write_schema(schema, options.queue), app)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        if overwrite:
            raise InvalidOption("a queue cannot be overwritten", 'Say outputMode("append")')
        options = write_options(self.options, streaming=True)
        return StreamWriter(options, check_write_schema(schema, options.queue))
