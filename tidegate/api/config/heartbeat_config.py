"""When a process counts as hung, from the settings of a job."""

from __future__ import annotations

from tidegate.actors.hosts.heartbeat_settings import HeartbeatSettings
from tidegate.api.config.checkpoint_config import CheckpointConfig


def heartbeats_of(config: CheckpointConfig) -> HeartbeatSettings:
    """Where no limit is set for a call, it may take half of the time that a checkpoint may take.

    A barrier waits for the call, so a longer one is likely to fail a checkpoint, and with it whoever waits for the
    barrier behind it. Without periodic checkpoints nothing waits, and there is no limit.
    """
    limit_ms = config.call_timeout
    if limit_ms is None and config.interval is not None:
        limit_ms = max(config.heartbeat_interval, config.timeout // 2)
    return HeartbeatSettings(config.heartbeat_interval, config.heartbeat_timeout, limit_ms)
