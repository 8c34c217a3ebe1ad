"""`RequestCounts`: how often this process has asked S3, and how often it had to ask storage again."""

from __future__ import annotations

import threading


class RequestCounts:
    """Those of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.s3_requests = 0
        """Attempts, those that were tried again included."""
        self.retries = 0
        """Attempts after one that has failed, on any storage."""

    def s3_request(self, again: bool) -> None:
        """An attempt begins. `again`: the one before has failed."""
        with self._lock:
            self.s3_requests += 1
            self.retries += again

    def tried_again(self) -> None:
        """Storage other than S3 is tried once more."""
        with self._lock:
            self.retries += 1


OF_THIS_PROCESS = RequestCounts()
