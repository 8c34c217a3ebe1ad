"""Errors of the Spark bridge: what was wrong, where, what to do."""

from __future__ import annotations

from tidegate.storage.errors import ConfigurationError, TidegateError


class SparkBridgeError(TidegateError):
    """Raised if Ray or Spark failed to do what a session, a staged DataFrame or a table read needed."""


class SparkTimeoutError(SparkBridgeError):
    """Raised if Ray or Spark did not answer in the allowed time."""


class SparkLostError(SparkBridgeError):
    """Raised if Spark's driver has ended or does not answer, or if there was no executor for too long."""


class QueryFailedError(SparkBridgeError, ConfigurationError):
    """Raised if the streaming query that feeds a job has failed. It is a ConfigurationError, because a restart does not
    help.
    """
