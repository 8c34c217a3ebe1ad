"""tidegate: exactly-once, stateful stream programs in Python, run as Ray actors beside Spark executors.

    import tidegate as tg

These are the names for driver scripts: the environment, streams, aggregates, configuration, and errors.
`tidegate.recovery` lists, verifies and restores checkpoints; `tidegate.testing` runs a pipeline under simulated faults.

Names are imported on first use (PEP 562), because `import tidegate.storage.ids` runs this file too and must not load
the whole package. Type checkers read the imports below instead, so they know exactly these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tidegate.actors.hosts.job_context import DataPlaneOptions
    from tidegate.actors.operators.aggregates.aggregate import (
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
    from tidegate.actors.operators.aggregates.aggregate_function import BatchAggregateFunction
    from tidegate.actors.operators.aggregates.functions.sketches import approx_count_distinct, approx_quantile
    from tidegate.actors.operators.batches.batch_function import BatchContext, BatchFunction
    from tidegate.actors.operators.rows.broadcast_process import (
        BroadcastContext,
        BroadcastProcessFunction,
        KeyedBroadcastProcessFunction,
    )
    from tidegate.actors.operators.rows.process_functions import (
        CoProcessFunction,
        ProcessBatchContext,
        ProcessContext,
        ProcessFunction,
    )
    from tidegate.actors.operators.sinks.sink import CommitContext, Sink, SinkContext
    from tidegate.actors.operators.state.key_scope import KeyGroups
    from tidegate.actors.operators.state.keyed_state import ListState, MapState, ValueState
    from tidegate.actors.operators.state.operator_state import BroadcastState, OperatorListState
    from tidegate.actors.operators.state.reducing_state import AggregateFunction, AggregatingState, ReducingState
    from tidegate.actors.operators.state.state_types import Pickled
    from tidegate.actors.operators.state.timers import TimeDomain, TimerService
    from tidegate.actors.operators.state.ttl import StateTtl
    from tidegate.actors.operators.watermarks.alignment import WatermarkAlignment
    from tidegate.actors.operators.window_functions.process_windows import (
        ProcessWindowContext,
        ProcessWindowFunction,
    )
    from tidegate.actors.operators.windows.window_specs import Count, Cumulating, Session, Sliding, Tumbling
    from tidegate.actors.protocol.errors import OperatorError
    from tidegate.actors.protocol.side_outputs import OutputTag
    from tidegate.actors.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
    from tidegate.actors.runtimes.running_job import JobProgress
    from tidegate.actors.sources.master_hooks import MasterHook
    from tidegate.actors.sources.source import ReadResult, Source, SourceReader, SourceSplit
    from tidegate.api.config.config_file import load_config
    from tidegate.api.config.sections.checkpoint_config import CheckpointConfig
    from tidegate.api.environment import StreamEnvironment
    from tidegate.api.streams.connected_streams import ConnectedStreams
    from tidegate.api.streams.stream import KeyedStream, Stream
    from tidegate.api.streams.windowed_stream import WindowedStream
    from tidegate.api.submission.job import Job
    from tidegate.api.submission.restore_report import RestoreReport
    from tidegate.api.tables.output_tables import CollectedRows, OutputTable, open_table
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
        "Aggregate": "actors.operators.aggregates.aggregate",
        "AggregateFunction": "actors.operators.state.reducing_state",
        "AggregatingState": "actors.operators.state.reducing_state",
        "BatchAggregateFunction": "actors.operators.aggregates.aggregate_function",
        "BatchContext": "actors.operators.batches.batch_function",
        "BatchFunction": "actors.operators.batches.batch_function",
        "BroadcastContext": "actors.operators.rows.broadcast_process",
        "BroadcastProcessFunction": "actors.operators.rows.broadcast_process",
        "BroadcastState": "actors.operators.state.operator_state",
        "CheckpointConfig": "api.config.sections.checkpoint_config",
        "CheckpointError": "storage.errors",
        "CoProcessFunction": "actors.operators.rows.process_functions",
        "CollectedRows": "api.tables.output_tables",
        "ConfigurationError": "storage.errors",
        "ConnectedStreams": "api.streams.connected_streams",
        "CommitContext": "actors.operators.sinks.sink",
        "CorruptionError": "storage.errors",
        "Count": "actors.operators.windows.window_specs",
        "Cumulating": "actors.operators.windows.window_specs",
        "DataPlaneOptions": "actors.hosts.job_context",
        "IncompatibleStateError": "storage.errors",
        "Job": "api.submission.job",
        "JobFailedError": "storage.errors",
        "JobProgress": "actors.runtimes.running_job",
        "JobTimeoutError": "storage.errors",
        "KeyGroups": "actors.operators.state.key_scope",
        "KeyedBroadcastProcessFunction": "actors.operators.rows.broadcast_process",
        "KeyedStream": "api.streams.stream",
        "ListState": "actors.operators.state.keyed_state",
        "MAX_WATERMARK_MS": "actors.protocol.stream_elements",
        "MIN_WATERMARK_MS": "actors.protocol.stream_elements",
        "MapState": "actors.operators.state.keyed_state",
        "MasterHook": "actors.sources.master_hooks",
        "OperatorError": "actors.protocol.errors",
        "OperatorListState": "actors.operators.state.operator_state",
        "OutputTable": "api.tables.output_tables",
        "OutputTag": "actors.protocol.side_outputs",
        "Pickled": "actors.operators.state.state_types",
        "ProcessBatchContext": "actors.operators.rows.process_functions",
        "ProcessContext": "actors.operators.rows.process_functions",
        "ProcessFunction": "actors.operators.rows.process_functions",
        "ProcessWindowContext": "actors.operators.window_functions.process_windows",
        "ProcessWindowFunction": "actors.operators.window_functions.process_windows",
        "ReadResult": "actors.sources.source",
        "ReducingState": "actors.operators.state.reducing_state",
        "RestartStrategy": "recovery.restart_strategy",
        "RestoreReport": "api.submission.restore_report",
        "Session": "actors.operators.windows.window_specs",
        "Sink": "actors.operators.sinks.sink",
        "SinkContext": "actors.operators.sinks.sink",
        "Sliding": "actors.operators.windows.window_specs",
        "Source": "actors.sources.source",
        "SourceReader": "actors.sources.source",
        "SourceSplit": "actors.sources.source",
        "StateTtl": "actors.operators.state.ttl",
        "StorageError": "storage.errors",
        "Stream": "api.streams.stream",
        "StreamEnvironment": "api.environment",
        "TableError": "storage.errors",
        "TidegateError": "storage.errors",
        "TimeDomain": "actors.operators.state.timers",
        "TimerService": "actors.operators.state.timers",
        "Tumbling": "actors.operators.windows.window_specs",
        "ValueState": "actors.operators.state.keyed_state",
        "WatermarkAlignment": "actors.operators.watermarks.alignment",
        "WindowedStream": "api.streams.windowed_stream",
        "approx_count_distinct": "actors.operators.aggregates.functions.sketches",
        "approx_quantile": "actors.operators.aggregates.functions.sketches",
        "arg_max": "actors.operators.aggregates.aggregate",
        "arg_min": "actors.operators.aggregates.aggregate",
        "bool_and": "actors.operators.aggregates.aggregate",
        "bool_or": "actors.operators.aggregates.aggregate",
        "collect_list": "actors.operators.aggregates.aggregate",
        "count": "actors.operators.aggregates.aggregate",
        "count_distinct": "actors.operators.aggregates.aggregate",
        "first": "actors.operators.aggregates.aggregate",
        "last": "actors.operators.aggregates.aggregate",
        "load_config": "api.config.config_file",
        "max": "actors.operators.aggregates.aggregate",
        "mean": "actors.operators.aggregates.aggregate",
        "min": "actors.operators.aggregates.aggregate",
        "open_table": "api.tables.output_tables",
        "stddev_pop": "actors.operators.aggregates.aggregate",
        "stddev_samp": "actors.operators.aggregates.aggregate",
        "sum": "actors.operators.aggregates.aggregate",
        "udaf": "actors.operators.aggregates.aggregate",
        "var_pop": "actors.operators.aggregates.aggregate",
        "var_samp": "actors.operators.aggregates.aggregate",
    }
    __getattr__, __dir__ = lazy_names(__name__, _HOME_OF, submodules=("recovery", "testing"))


__all__ = [
    "MAX_WATERMARK_MS",
    "MIN_WATERMARK_MS",
    "Aggregate",
    "AggregateFunction",
    "AggregatingState",
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
    "ConfigurationError",
    "ConnectedStreams",
    "CorruptionError",
    "Count",
    "Cumulating",
    "DataPlaneOptions",
    "IncompatibleStateError",
    "Job",
    "JobFailedError",
    "JobProgress",
    "JobTimeoutError",
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
    "ReadResult",
    "ReducingState",
    "RestartStrategy",
    "RestoreReport",
    "Session",
    "Sink",
    "SinkContext",
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
