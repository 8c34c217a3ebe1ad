"""`Buckets`: how many requests a second each client may make; pure, the clock is handed in (the token bucket)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

CLIENTS_MAX = 1_000


@dataclass(slots=True)
class _Bucket:
    left: float
    at_s: float


class Buckets:
    """So many requests a second a client, and `burst` at once. The clients that have asked last are remembered."""

    def __init__(self, a_second: float, burst: int, clients_max: int = CLIENTS_MAX) -> None:
        self._a_second = a_second
        self._burst = burst
        self._clients_max = clients_max
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, client: str, now_s: float) -> bool:
        """Whether the client may make a request now."""
        bucket = self._buckets.pop(client, None) or _Bucket(self._burst, now_s)
        self._buckets[client] = bucket
        while len(self._buckets) > self._clients_max:
            self._buckets.popitem(last=False)
        bucket.left = min(self._burst, bucket.left + max(0.0, now_s - bucket.at_s) * self._a_second)
        bucket.at_s = now_s
        if bucket.left < 1:
            return False
        bucket.left -= 1
        return True
