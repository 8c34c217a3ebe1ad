"""Errors of the Spark bridge: what was wrong, where, what to do."""

from __future__ import annotations

from tidegate.storage.errors import ConfigurationError, TidegateError


class SparkBridgeError(TidegateError):
    """Ray or Spark did not do what a session, a staged DataFrame or a table read needed."""


class SparkTimeoutError(SparkBridgeError):
    """Ray or Spark did not answer in the allowed time."""


class SparkLostError(SparkBridgeError):
    """Spark's driver has ended, or does not answer; or there has been no executor for too long."""


class QueryFailedError(SparkBridgeError, ConfigurationError):
    """The streaming query that feeds a job has failed. A ConfigurationError, because a restart does not help."""
