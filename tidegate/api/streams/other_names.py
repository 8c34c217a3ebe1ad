"""Names of methods in PySpark, PyFlink, Bytewax and pandas, with the names of the corresponding methods in tidegate."""

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
    "sink_to": "to_sink(sink), or to_kafka(servers, topic=...)",
    "to_topic": "to_kafka(servers, topic=...)",
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
    "deduplicate": "key_by(...).deduplicate(...)",
    "unique": "distinct(columns), or key_by(...).deduplicate(by, keep=...)",
    "top_n": "key_by(...).top_n(n, by=...)",
    "add_columns": "with_columns(...)",
    "add_or_replace_columns": "with_columns(...)",
    "fillna": "with_columns(pl.col(column).fill_null(value))",
    "fill_null": "with_columns(pl.col(column).fill_null(value))",
    "fill": "with_columns(pl.col(column).fill_null(value))",
    "dropna": "filter(pl.col(column).is_not_null())",
    "drop_nulls": "filter(pl.col(column).is_not_null())",
    "project": "select(columns)",
    "select_columns": "select(columns)",
    "drop_columns": "drop(columns)",
    "without": "drop(columns)",
    "rename_columns": 'rename({"old": "new"})',
    "cast_to_types": "cast({...})",
    "fetch": "limit(n)",
    "head": "limit(n)",
    "take": "limit(n), or show(n)",
    "order_by": "key_by(...).top_n(...), or env.sql with ORDER BY and LIMIT",
    "flatten": "explode(column)",
    "join_lateral": "explode(column), or flat_map(fn)",
    "left_outer_join_lateral": "explode(column, outer=True), or flat_map(fn)",
    "left_outer_join": 'join(other, on=..., how="left")',
    "join_left": 'join(other, on=..., how="left")',
    "asof_join": "join_asof(other, on=...)",
    "join_interval": "interval_join(other, on=..., between=...)",
    "join_lookup": "lookup_join(table, on=...)",
    "window_join": "join(other, on=..., window=...)",
    "union_all": "union(other)",
    "concat": "union(other)",
    "concat_reindex": "union(other)",
    "split": "branch(condition)",
    "transform": "pipe(fn)",
    "apply": "map(fn), flat_map(fn), or key_by(...).stateful_map(fn, state=...)",
    "update": "map(fn)",
    "set_timestamp": "assign_timestamps(column)",
    "tumble": "key_by(...).window(tg.Tumbling(size))",
    "tumbling_window": "key_by(...).window(tg.Tumbling(size))",
    "tumbling_count_window": "key_by(...).window(tg.Count(n))",
    "sliding_count_window": "key_by(...).window(tg.Count(n, slide=1))",
    "hop": "key_by(...).window(tg.Sliding(size, slide))",
    "hopping_window": "key_by(...).window(tg.Sliding(size, slide))",
    "cumulate": "key_by(...).window(tg.Cumulating(step, size))",
    "session": "key_by(...).window(tg.Session(gap))",
    "windowby": "key_by(...).window(...)",
    "count": "aggregate(n=tg.count())",
    "sum": "aggregate(total=tg.sum(column))",
    "over_window": 'key_by(...).aggregate(..., emit="each"), over all rows up to each',
    "over": 'key_by(...).aggregate(..., emit="each"), over all rows up to each',
    "cumsum": 'key_by(...).aggregate(total=tg.sum(column), emit="each")',
    "cum_sum": 'key_by(...).aggregate(total=tg.sum(column), emit="each")',
    "get_schema": "schema, or columns",
    "to_pandas": "collect(), then env.execute().wait() and to_pandas()",
    "take_all": "collect(), then env.execute().wait() and to_arrow()",
    "iter_rows": "collect(), or peek(fn) while the job runs",
    "iter_batches": "collect(), then env.execute().wait() and to_arrow()",
    "write_parquet": "to_table(url)",
    "sink": "to_sink(sink), to_table(url) or to_delta(url)",
}
KEYED_STREAMS: Mapping[str, str] = {
    "agg": "aggregate(...)",
    "count": "aggregate(n=tg.count())",
    "sum": "aggregate(total=tg.sum(column))",
    "min": "aggregate(least=tg.min(column))",
    "max": "aggregate(greatest=tg.max(column))",
    "cumsum": 'aggregate(total=tg.sum(column), emit="each")',
    "cum_sum": 'aggregate(total=tg.sum(column), emit="each")',
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
    """Base class that raises AttributeError for names of methods of other engines.

    The error names the method of tidegate with the same purpose.
    """

    _other_names: ClassVar[Mapping[str, str]] = {}
    _before: ClassVar[tuple[str, str] | None] = None
    """Name of the attribute with the stream before, and of the step that was called on it. None for other classes."""

    if not TYPE_CHECKING:  # to a type checker, a class with this method would have every attribute

        def __getattr__(self, name: str) -> object:
            plain = f"{type(self).__name__!r} object has no attribute {name!r}"
            ours = self._other_names.get(name) or self._of_stream(name)
            raise AttributeError(plain if ours is None else f"{plain}; in tidegate it is {ours}", name=name, obj=self)

        def _of_stream(self, name: str) -> str | None:
            if self._before is None or name.startswith("_"):
                return None
            attribute, step = self._before
            has_it = hasattr(type(vars(self).get(attribute)), name)
            return f"{name} of a stream: use it before {step}, or on a result" if has_it else None
