"""Names that methods have in PySpark, PyFlink, Bytewax and pandas, and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

STREAMS: Mapping[str, str] = {
    "groupBy": "key_by(...).aggregate(...)",
    "groupby": "key_by(...).aggregate(...)",
    "group_by": "key_by(...).aggregate(...)",
    "keyBy": "key_by(...)",
    "agg": "aggregate(...)",
    "withColumn": "with_columns(name=expression)",
    "withColumns": "with_columns(...)",
    "with_column": "with_columns(name=expression)",
    "withColumnRenamed": 'rename({"old": "new"})',
    "selectExpr": "select(...) with polars expressions, or env.sql(...)",
    "flatMap": "flat_map(fn)",
    "mapPartitions": "map_batches(fn)",
    "mapInPandas": "map_batches(fn)",
    "map_partitions": "map_batches(fn)",
    "mapInArrow": "map_batches(fn)",
    "applyInPandas": "key_by(...).process(...), or window(...).apply(fn)",
    "dropDuplicates": "distinct(columns), or key_by(...).deduplicate(ttl=...)",
    "drop_duplicates": "distinct(columns)",
    "dropDuplicatesWithinWatermark": "key_by(...).deduplicate(ttl=...); see docs/coming-from.md",
    "unionAll": "union(other)",
    "unionByName": "union(other, by_name=True)",
    "orderBy": "key_by(...).top_n(...): a stream has no end at which it could be sorted",
    "sort": "key_by(...).top_n(...): a stream has no end at which it could be sorted",
    "withWatermark": "assign_timestamps(column, max_out_of_orderness)",
    "assign_timestamps_and_watermarks": "assign_timestamps(column, max_out_of_orderness)",
    "crossJoin": "join(other, on=...), or connect(other.broadcast())",
    "leftOuterJoin": 'join(other, on=..., how="left")',
    "foreachBatch": "for_each_checkpoint(fn)",
    "foreach": "to_sink(sink), or for_each_checkpoint(fn)",
    "writeStream": "to_table(url), to_delta(url), to_sink(sink) or for_each_checkpoint(fn)",
    "write": "to_table(url) or to_delta(url)",
    "sink_to": "to_sink(sink)",
    "add_sink": "to_sink(sink)",
    "execute_and_collect": "collect(), then env.execute()",
    "toPandas": "collect(), then env.execute().wait() and to_arrow()",
    "get_side_output": "side_output(tag)",
    "key_on": "key_by(...)",
    "window_all": "window(...)",
    "windowAll": "window(...)",
    "repartition": "rebalance(), or parallelism= of the next step",
    "coalesce": "parallelism= of the next step",
    "astype": "cast({...})",
    "assign": "with_columns(...)",
    "reduce": "key_by(...).reduce(fn)",
    "stateful_map": "key_by(...).stateful_map(fn, state=...)",
}
KEYED_STREAMS: Mapping[str, str] = {
    "agg": "aggregate(...)",
    "count": "aggregate(n=tg.count())",
    "sum": "aggregate(total=tg.sum(column))",
    "min": "aggregate(least=tg.min(column))",
    "max": "aggregate(greatest=tg.max(column))",
    "applyInPandas": "map_groups(fn) of a bounded input, or window(...).apply(fn)",
    "dropDuplicates": "deduplicate(...)",
    "transformWithState": "process(function)",
    "transformWithStateInPandas": "process(function)",
    "applyInPandasWithState": "process(function)",
    "flatMapGroupsWithState": "process(function)",
    "map": "stateful_map(fn, state=...); without state call map before key_by",
    "flat_map": "process(function), which has state; without state call flat_map before key_by",
    "filter": "process(function), which has state; without state call filter before key_by",
}
WINDOWED_STREAMS: Mapping[str, str] = {
    "agg": "aggregate(...)",
    "reduce": "aggregate(...) with tg.udaf, or apply(fn)",
    "allowedLateness": "allowed_lateness(duration)",
    "side_output_late_data": "late_rows() of the result",
    "sideOutputLateData": "late_rows() of the result",
    "trigger": "aggregate(emit_every=...)",
}


ENVIRONMENTS: Mapping[str, str] = {
    "from_collection": "from_rows(rows), or from_batches(frame)",
    "fromCollection": "from_rows(rows), or from_batches(frame)",
    "createDataFrame": "from_rows(rows), or from_batches(frame)",
    "from_elements": "from_rows(rows)",
    "from_items": "from_rows(rows)",
    "from_pandas": "from_batches(frame)",
    "from_polars": "from_batches(frame)",
    "from_arrow": "from_batches(table)",
    "add_source": "from_source(source)",
    "read_text_file": 'from_files(path, format="text")',
    "read": "from_files(path), from_delta(url) or from_dataframe(df)",
    "readStream": "from_files(path, discover=...), from_kafka(...) or from_dataframe(df)",
    "set_parallelism": "StreamEnvironment.local(parallelism), or parallelism= of a step",
    "enable_checkpointing": "execute(checkpoints=tg.CheckpointConfig(interval=...))",
    "sql_query": "sql(query)",
    "table": "from_delta(url), or create_temporary_view(name, stream) for SQL",
    "udf": "map(fn) of a stream",
}


class OtherNames:
    """Names the method that does here what a method of another engine does, where a program asks for that one."""

    _other_names: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # to a type checker, a class with this method would have every attribute

        def __getattr__(self, name: str) -> object:
            plain = f"{type(self).__name__!r} object has no attribute {name!r}"
            ours = self._other_names.get(name)
            raise AttributeError(plain if ours is None else f"{plain}; in tidegate it is {ours}", name=name, obj=self)
