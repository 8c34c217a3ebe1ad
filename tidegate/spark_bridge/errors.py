"""Errors of the Spark bridge. Each text contains what was wrong, where, and what to do."""

from __future__ import annotations

from tidegate.storage.errors import ConfigurationError, TidegateError


class SparkBridgeError(TidegateError):
    """Raised if Ray or Spark failed during the work for a session, a staged DataFrame or a table."""


class SparkTimeoutError(SparkBridgeError):
    """Raised if Ray or Spark did not answer within the time limit."""


class SparkLostError(SparkBridgeError):
    """Raised if Spark's driver has ended or does not answer, or if Spark had no executors for too long."""


class QueryFailedError(SparkBridgeError, ConfigurationError):
    """Raised if the streaming query that writes the input of a job has failed.

    It is a ConfigurationError, because a restart of the job does not help.
    """
