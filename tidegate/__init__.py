"""tidegate: exactly-once, stateful stream programs in Python, run as Ray actors beside Spark executors.

    import tidegate as tg

This room is what a driver script imports: the environment, streams, aggregates, configuration, and errors.
`tidegate.recovery` lists, verifies and restores checkpoints; `tidegate.testing` runs a pipeline under simulated faults.
"""

from __future__ import annotations

from tidegate.actors.hosts.job_context import DataPlaneOptions
from tidegate.actors.operators.batches.aggregates import Aggregate, count, max, mean, min, sum
from tidegate.actors.protocol.errors import OperatorError
from tidegate.actors.runtimes.running_job import JobProgress
from tidegate.actors.sources.master_hooks import MasterHook
from tidegate.actors.sources.source import ReadResult, Source, SourceReader, SourceSplit
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.config_file import load_config
from tidegate.api.environment import StreamEnvironment
from tidegate.api.keyed_stream import KeyedStream
from tidegate.api.output_tables import CollectedRows, OutputTable
from tidegate.api.process_functions import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    AggregateFunction,
    AggregatingState,
    BroadcastContext,
    BroadcastProcessFunction,
    BroadcastState,
    ConnectedStreams,
    CoProcessFunction,
    KeyedBroadcastProcessFunction,
    ListState,
    MapState,
    OperatorListState,
    Pickled,
    ProcessContext,
    ProcessFunction,
    ReducingState,
    StateTtl,
    TimeDomain,
    TimerService,
    ValueState,
)
from tidegate.api.stream import Stream
from tidegate.api.submission.job import Job
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptionError,
    JobFailedError,
    JobTimeoutError,
    StorageError,
    TableError,
    TidegateError,
)

__all__ = [
    "MAX_WATERMARK_MS",
    "MIN_WATERMARK_MS",
    "Aggregate",
    "AggregateFunction",
    "AggregatingState",
    "BroadcastContext",
    "BroadcastProcessFunction",
    "BroadcastState",
    "CheckpointConfig",
    "CheckpointError",
    "CoProcessFunction",
    "CollectedRows",
    "ConfigurationError",
    "ConnectedStreams",
    "CorruptionError",
    "DataPlaneOptions",
    "Job",
    "JobFailedError",
    "JobProgress",
    "JobTimeoutError",
    "KeyedBroadcastProcessFunction",
    "KeyedStream",
    "ListState",
    "MapState",
    "MasterHook",
    "OperatorError",
    "OperatorListState",
    "OutputTable",
    "Pickled",
    "ProcessContext",
    "ProcessFunction",
    "ReadResult",
    "ReducingState",
    "RestartStrategy",
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
    "ValueState",
    "count",
    "load_config",
    "max",
    "mean",
    "min",
    "sum",
]
