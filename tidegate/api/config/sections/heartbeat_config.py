"""Works out from a job's settings when one of its processes counts as hung."""

from __future__ import annotations

from tidegate.actors.drivers.heartbeat_settings import HeartbeatSettings
from tidegate.api.config.sections.checkpoint_config import CheckpointConfig


def heartbeats_of(config: CheckpointConfig) -> HeartbeatSettings:
    """The heartbeat settings, in milliseconds. Without `call_timeout`, a call may take half of a checkpoint's timeout.

    Barriers wait for the call, so a longer one would probably fail the checkpoint. Without periodic checkpoints no
    barrier waits, and there is no limit.
    """
    limit_ms = config.call_timeout
    if limit_ms is None and config.interval is not None:
        limit_ms = max(config.heartbeat_interval, config.timeout // 2)
    return HeartbeatSettings(config.heartbeat_interval, config.heartbeat_timeout, limit_ms)
