"""tidegate: exactly-once, stateful stream programs in Python, run as Ray actors next to Spark executors.

    import tidegate as tg

This module offers the names for driver scripts: the environment, streams, aggregates, configuration, and errors.
`tidegate.recovery` lists, verifies and restores checkpoints. `tidegate.testing` runs a pipeline under simulated faults.

Names are imported on first use (PEP 562). `import tidegate.storage.ids` runs this file too, and must not load the whole
package. Type checkers read the imports below instead, so they see exactly these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tidegate.actors.drivers.job_context import DataPlaneOptions
    from tidegate.actors.runtimes.running_job import JobProgress
    from tidegate.api.config.checkpoint_config import CheckpointConfig
    from tidegate.api.config.config_file import load_config
    from tidegate.api.environment import StreamEnvironment
    from tidegate.api.streams.connected_streams import ConnectedStreams
    from tidegate.api.streams.stream import KeyedStream, Stream
    from tidegate.api.streams.windowed_stream import WindowedStream
    from tidegate.api.submission.job import Job
    from tidegate.api.submission.restoring import RestoreReport
    from tidegate.api.tables.output_tables import CollectedRows, OutputTable, open_table
    from tidegate.connectors.committing_sink import (
        Committable,
        Committer,
        CommittingContext,
        CommittingSink,
        CommittingWriter,
        CommitToken,
        SinkFiles,
    )
    from tidegate.connectors.formats.avro import AvroFormat
    from tidegate.connectors.formats.csv import CsvFormat
    from tidegate.connectors.formats.debezium import DebeziumFormat
    from tidegate.connectors.formats.json import JsonFormat
    from tidegate.connectors.formats.json_schema import JsonSchemaFormat
    from tidegate.connectors.formats.protobuf import ProtobufFormat
    from tidegate.connectors.formats.registry import SchemaRegistry
    from tidegate.connectors.sink import CommitContext, Sink, SinkContext
    from tidegate.connectors.source import MasterHook, ReadResult, Source, SourceReader, SourceSplit
    from tidegate.connectors.sql.lookup import DatabaseTable
    from tidegate.operators.aggregates.aggregate import (
        Aggregate,
        arg_max,
        arg_min,
        bool_and,
        bool_or,
        collect_list,
        count,
        count_distinct,
        first,
        last,
        max,
        mean,
        min,
        stddev_pop,
        stddev_samp,
        sum,
        udaf,
        var_pop,
        var_samp,
    )
    from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction
    from tidegate.operators.aggregates.sketches import approx_count_distinct, approx_quantile
    from tidegate.operators.functions.batch_functions import BatchContext, BatchFunction
    from tidegate.operators.functions.process_functions import (
        BroadcastContext,
        BroadcastProcessFunction,
        CoProcessFunction,
        KeyedBroadcastProcessFunction,
        ProcessBatchContext,
        ProcessContext,
        ProcessFunction,
    )
    from tidegate.operators.state.keyed_state import (
        AggregateFunction,
        AggregatingState,
        ListState,
        MapState,
        ReducingState,
        ValueState,
    )
    from tidegate.operators.state.keys import KeyGroups
    from tidegate.operators.state.operator_state import BroadcastState, OperatorListState
    from tidegate.operators.state.state_types import Pickled
    from tidegate.operators.state.timers import TimeDomain, TimerService
    from tidegate.operators.state.ttl import StateTtl
    from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment
    from tidegate.operators.windows.process_windows import (
        ProcessWindowContext,
        ProcessWindowFunction,
    )
    from tidegate.operators.windows.window_specs import Count, Cumulating, Session, Sliding, Tumbling
    from tidegate.protocol.edges import OutputTag
    from tidegate.protocol.failures import OperatorError
    from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
    from tidegate.recovery.restart_strategy import RestartStrategy
    from tidegate.storage.errors import (
        CheckpointError,
        ConfigurationError,
        CorruptionError,
        IncompatibleStateError,
        JobFailedError,
        JobTimeoutError,
        StorageError,
        TableError,
        TidegateError,
    )
else:
    from tidegate.lazy_names import lazy_names

    _HOME_OF = {
        "Aggregate": "operators.aggregates.aggregate",
        "AggregateFunction": "operators.state.keyed_state",
        "AggregatingState": "operators.state.keyed_state",
        "BatchAggregateFunction": "operators.aggregates.aggregate_function",
        "BatchContext": "operators.functions.batch_functions",
        "BatchFunction": "operators.functions.batch_functions",
        "BroadcastContext": "operators.functions.process_functions",
        "BroadcastProcessFunction": "operators.functions.process_functions",
        "BroadcastState": "operators.state.operator_state",
        "CheckpointConfig": "api.config.checkpoint_config",
        "CheckpointError": "storage.errors",
        "CoProcessFunction": "operators.functions.process_functions",
        "CollectedRows": "api.tables.output_tables",
        "ConfigurationError": "storage.errors",
        "ConnectedStreams": "api.streams.connected_streams",
        "CommitContext": "connectors.sink",
        "CommitToken": "connectors.committing_sink",
        "Committable": "connectors.committing_sink",
        "Committer": "connectors.committing_sink",
        "CommittingContext": "connectors.committing_sink",
        "CommittingSink": "connectors.committing_sink",
        "CommittingWriter": "connectors.committing_sink",
        "CorruptionError": "storage.errors",
        "Count": "operators.windows.window_specs",
        "Cumulating": "operators.windows.window_specs",
        "DatabaseTable": "connectors.sql.lookup",
        "AvroFormat": "connectors.formats.avro",
        "CsvFormat": "connectors.formats.csv",
        "DebeziumFormat": "connectors.formats.debezium",
        "JsonFormat": "connectors.formats.json",
        "JsonSchemaFormat": "connectors.formats.json_schema",
        "ProtobufFormat": "connectors.formats.protobuf",
        "SchemaRegistry": "connectors.formats.registry",
        "DataPlaneOptions": "actors.drivers.job_context",
        "IncompatibleStateError": "storage.errors",
        "Job": "api.submission.job",
        "JobFailedError": "storage.errors",
        "JobProgress": "actors.runtimes.running_job",
        "JobTimeoutError": "storage.errors",
        "KeyGroups": "operators.state.keys",
        "KeyedBroadcastProcessFunction": "operators.functions.process_functions",
        "KeyedStream": "api.streams.stream",
        "ListState": "operators.state.keyed_state",
        "MAX_WATERMARK_MS": "protocol.stream_elements",
        "MIN_WATERMARK_MS": "protocol.stream_elements",
        "MapState": "operators.state.keyed_state",
        "MasterHook": "connectors.source",
        "OperatorError": "protocol.failures",
        "OperatorListState": "operators.state.operator_state",
        "OutputTable": "api.tables.output_tables",
        "OutputTag": "protocol.edges",
        "Pickled": "operators.state.state_types",
        "ProcessBatchContext": "operators.functions.process_functions",
        "ProcessContext": "operators.functions.process_functions",
        "ProcessFunction": "operators.functions.process_functions",
        "ProcessWindowContext": "operators.windows.process_windows",
        "ProcessWindowFunction": "operators.windows.process_windows",
        "ReadResult": "connectors.source",
        "ReducingState": "operators.state.keyed_state",
        "RestartStrategy": "recovery.restart_strategy",
        "RestoreReport": "api.submission.restoring",
        "Session": "operators.windows.window_specs",
        "Sink": "connectors.sink",
        "SinkContext": "connectors.sink",
        "SinkFiles": "connectors.committing_sink",
        "Sliding": "operators.windows.window_specs",
        "Source": "connectors.source",
        "SourceReader": "connectors.source",
        "SourceSplit": "connectors.source",
        "StateTtl": "operators.state.ttl",
        "StorageError": "storage.errors",
        "Stream": "api.streams.stream",
        "StreamEnvironment": "api.environment",
        "TableError": "storage.errors",
        "TidegateError": "storage.errors",
        "TimeDomain": "operators.state.timers",
        "TimerService": "operators.state.timers",
        "Tumbling": "operators.windows.window_specs",
        "ValueState": "operators.state.keyed_state",
        "WatermarkAlignment": "operators.watermarks.watermark_generator",
        "WindowedStream": "api.streams.windowed_stream",
        "approx_count_distinct": "operators.aggregates.sketches",
        "approx_quantile": "operators.aggregates.sketches",
        "arg_max": "operators.aggregates.aggregate",
        "arg_min": "operators.aggregates.aggregate",
        "bool_and": "operators.aggregates.aggregate",
        "bool_or": "operators.aggregates.aggregate",
        "collect_list": "operators.aggregates.aggregate",
        "count": "operators.aggregates.aggregate",
        "count_distinct": "operators.aggregates.aggregate",
        "first": "operators.aggregates.aggregate",
        "last": "operators.aggregates.aggregate",
        "load_config": "api.config.config_file",
        "max": "operators.aggregates.aggregate",
        "mean": "operators.aggregates.aggregate",
        "min": "operators.aggregates.aggregate",
        "open_table": "api.tables.output_tables",
        "stddev_pop": "operators.aggregates.aggregate",
        "stddev_samp": "operators.aggregates.aggregate",
        "sum": "operators.aggregates.aggregate",
        "udaf": "operators.aggregates.aggregate",
        "var_pop": "operators.aggregates.aggregate",
        "var_samp": "operators.aggregates.aggregate",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOME_OF, submodules=("recovery", "testing"))


__all__ = [
    "MAX_WATERMARK_MS",
    "MIN_WATERMARK_MS",
    "Aggregate",
    "AggregateFunction",
    "AggregatingState",
    "AvroFormat",
    "BatchAggregateFunction",
    "BatchContext",
    "BatchFunction",
    "BroadcastContext",
    "BroadcastProcessFunction",
    "BroadcastState",
    "CheckpointConfig",
    "CheckpointError",
    "CoProcessFunction",
    "CollectedRows",
    "CommitContext",
    "CommitToken",
    "Committable",
    "Committer",
    "CommittingContext",
    "CommittingSink",
    "CommittingWriter",
    "ConfigurationError",
    "ConnectedStreams",
    "CorruptionError",
    "Count",
    "CsvFormat",
    "Cumulating",
    "DataPlaneOptions",
    "DatabaseTable",
    "DebeziumFormat",
    "IncompatibleStateError",
    "Job",
    "JobFailedError",
    "JobProgress",
    "JobTimeoutError",
    "JsonFormat",
    "JsonSchemaFormat",
    "KeyGroups",
    "KeyedBroadcastProcessFunction",
    "KeyedStream",
    "ListState",
    "MapState",
    "MasterHook",
    "OperatorError",
    "OperatorListState",
    "OutputTable",
    "OutputTag",
    "Pickled",
    "ProcessBatchContext",
    "ProcessContext",
    "ProcessFunction",
    "ProcessWindowContext",
    "ProcessWindowFunction",
    "ProtobufFormat",
    "ReadResult",
    "ReducingState",
    "RestartStrategy",
    "RestoreReport",
    "SchemaRegistry",
    "Session",
    "Sink",
    "SinkContext",
    "SinkFiles",
    "Sliding",
    "Source",
    "SourceReader",
    "SourceSplit",
    "StateTtl",
    "StorageError",
    "Stream",
    "StreamEnvironment",
    "TableError",
    "TidegateError",
    "TimeDomain",
    "TimerService",
    "Tumbling",
    "ValueState",
    "WatermarkAlignment",
    "WindowedStream",
    "approx_count_distinct",
    "approx_quantile",
    "arg_max",
    "arg_min",
    "bool_and",
    "bool_or",
    "collect_list",
    "count",
    "count_distinct",
    "first",
    "last",
    "load_config",
    "max",
    "mean",
    "min",
    "open_table",
    "stddev_pop",
    "stddev_samp",
    "sum",
    "udaf",
    "var_pop",
    "var_samp",
]
