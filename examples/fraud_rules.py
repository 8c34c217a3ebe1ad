"""Fraud rules by broadcast: what an account spends within an hour, against a limit that changes while the job runs.

    .venv/bin/python examples/fraud_rules.py

Payments are keyed by account; changes of the limit go to every subtask. Nothing orders the two streams, but both have
event time. A payment sets an event-time timer for its own moment. The timer fires when the watermarks of both streams
have passed that moment, so every change of the limit until then is known. So the alerts are the same on every run, also
on one that was restored.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

import tidegate as tg

HOUR_MS = 3_600_000
ALERTS = pa.schema({"account": pa.int64(), "at": pa.int64(), "spent": pa.int64(), "limit": pa.int64()})


class Fraud(tg.KeyedBroadcastProcessFunction):
    """Tells when an account has spent more within an hour than the limit of that moment."""

    def open(self, context: tg.ProcessContext) -> None:
        """Limits by the moment from which they hold, the same in every subtask; payments of one account."""
        self.limits = context.broadcast_state(tg.MapState("limits", pa.int64(), pa.int64()))
        self.payments = context.state(tg.MapState("payments", pa.int64(), pa.int64()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        """A payment waits for its moment."""
        self.payments.put(row["at"], (self.payments.get(row["at"]) or 0) + row["amount"])
        context.timer_service.register_event_time_timer(row["at"])

    def process_broadcast(self, row: dict[str, Any], context: tg.BroadcastContext) -> None:
        """The limit changes."""
        self.limits.put(row["since"], row["limit"])

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """All payments and limits until this moment are known."""
        for at in list(self.payments.keys()):
            if at <= timestamp - HOUR_MS:
                self.payments.remove(at)
        spent = sum(amount for at, amount in self.payments.items() if at <= timestamp)
        _, limit = max(change for change in self.limits.items() if change[0] <= timestamp)
        if spent > limit:
            yield {**context.current_key, "at": timestamp, "spent": spent, "limit": limit}


def alerts(env: tg.StreamEnvironment, payments: pa.Table, limits: pa.Table) -> tg.Stream:
    """Payments (account, at, amount) that are suspicious, given limits (since, limit)."""
    changes = env.from_batches(limits, timestamp="since", name="limits")
    keyed = env.from_batches(payments, timestamp="at", max_out_of_orderness="1min", name="payments").key_by("account")
    return keyed.connect(changes.broadcast()).process(Fraud(), schema=ALERTS, name="fraud", uid="fraud")


def day(accounts: int, payments: int) -> tuple[pa.Table, pa.Table]:
    """A day of payments, and a limit that changes every six hours."""
    rng = random.Random(7)
    at = sorted(rng.randrange(24 * HOUR_MS) for _ in range(payments))
    of = [rng.randrange(accounts) for _ in at]
    table = pa.table({"account": of, "at": at, "amount": [rng.randrange(1, 100) for _ in at]})
    return table, pa.table({"since": [0, *(hours * HOUR_MS for hours in (6, 12, 18))], "limit": [400, 300, 350, 280]})


def main() -> None:
    """Run the day on this machine and show the first alerts."""
    with tempfile.TemporaryDirectory() as folder, tg.StreamEnvironment.local(2) as env:
        found = alerts(env, *day(accounts=100, payments=5_000)).collect()
        env.execute("fraud rules", checkpoints=tg.CheckpointConfig(storage=folder, interval="100ms")).wait("5min")
        rows = sorted(found.to_arrow().to_pylist(), key=lambda row: (row["at"], row["account"]))
    print(f"{len(rows)} alerts; the first of them:")
    for row in rows[:5]:
        print(row)


if __name__ == "__main__":
    main()
