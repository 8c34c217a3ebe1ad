"""tidegate: exactly-once, stateful stream programs in Python, run as Ray actors beside Spark executors.

    import tidegate as tg

This room is what a driver script imports: the environment, streams, aggregates, configuration, and errors.
`tidegate.recovery` lists, verifies and restores checkpoints; `tidegate.testing` runs a pipeline under simulated faults.
"""

from __future__ import annotations

from tidegate.actors.errors import OperatorError
from tidegate.actors.hooks import MasterHook
from tidegate.actors.operators.aggregates import Aggregate, count, max, mean, min, sum
from tidegate.actors.runtimes.context import DataPlaneOptions
from tidegate.actors.runtimes.job import JobProgress
from tidegate.actors.sources import ReadResult, Source, SourceReader, SourceSplit
from tidegate.config import CheckpointConfig
from tidegate.config_file import load_config
from tidegate.environment import StreamEnvironment
from tidegate.job import Job
from tidegate.keyed_stream import KeyedStream
from tidegate.process import (
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
from tidegate.recovery.restart import RestartStrategy
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
from tidegate.stream import Stream
from tidegate.tables import CollectedRows, OutputTable

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
