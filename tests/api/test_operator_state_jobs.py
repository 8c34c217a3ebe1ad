"""Jobs with operator state and with the broadcast pattern on the local runtime: stopped, restored, rescaled."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, await_events, config, finish, local, opening, rows
from passing_functions import PassesBoth

import tidegate as tg

Row = dict[str, Any]
TOLD = pa.schema({"k": pa.int64(), "n": pa.int64(), "rules": pa.string()})
FLUSH = 4
ROWS = 60


class Rules(tg.KeyedBroadcastProcessFunction):
    """Counts rows of a key; tells the count and the rules at the end, and once before, when a rule says so."""

    def open(self, context: tg.ProcessContext) -> None:
        self.rules = context.broadcast_state(tg.MapState("rules", pa.int64(), pa.string()))
        self.count = context.state(tg.ValueState("count", pa.int64()))

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        self.count.update((self.count.value() or 0) + 1)
        context.timer_service.register_event_time_timer(0)

    def process_broadcast(self, row: Row, context: tg.BroadcastContext) -> Iterator[Row]:
        self.rules.put(row["x"], f"rule {row['x']}")
        if row["x"] == FLUSH:
            counts: list[Row] = []

            def flush(key: Row, count: tg.ValueState) -> None:
                counts.append({**key, "n": count.value(), "rules": "flush"})
                count.clear()

            context.apply_to_keyed_state(self.count, flush)
            yield from counts

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[Row]:
        told = ",".join(self.rules.get(rule) for rule in sorted(self.rules.keys()))
        yield {**context.current_key, "n": self.count.value(), "rules": told}


def with_rules(env: tg.StreamEnvironment, source: GatedSource, rules: GatedSource) -> tg.CollectedRows:
    """Rows by key, after an edge whose barriers may be unaligned, and rules for all of them."""
    everything = env.from_source(source, uid="rows").rebalance().map(lambda row: row, schema=source.schema, uid="same")
    broadcast = env.from_source(rules, uid="rules", parallelism=1).broadcast()
    connected = everything.key_by("k").connect(broadcast)
    return connected.process(Rules(), schema=TOLD, uid="counts").collect(uid="told")


@pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 2)])
def test_broadcast_and_keyed_state_go_on_at_another_parallelism(
    tmp_path: Path, before: int, after: int, unaligned: bool
) -> None:
    """Rules that came before the restore are known to every subtask after it, and a rule gets through to all keys."""
    settings = {"unaligned": unaligned}
    with (
        opening(GatedSource(ROWS, ROWS, gates=[30])) as source,
        opening(GatedSource(6, gates=[3])) as rules,
        local(before) as env,
    ):
        with_rules(env, source, rules)
        first = env.execute("test job", checkpoints=config(tmp_path, **settings), restart=NO_RESTART)
        source.await_gate(30)
        rules.await_gate(3)
        path = first.trigger_checkpoint("4min")
        first.cancel()
    with (
        opening(GatedSource(ROWS, ROWS, gates=[50])) as source,
        opening(GatedSource(6, gates=[FLUSH, FLUSH + 1])) as rules,
        local(after) as env,
    ):
        found = with_rules(env, source, rules)
        second = env.execute("test job", checkpoints=config(tmp_path, **settings), restart=NO_RESTART, restore=path)
        source.await_gate(50)
        rules.await_gate(FLUSH)
        # A savepoint is aligned: rows before the gate were processed before it, and then the rule that flushes them.
        second.savepoint(str(tmp_path / "rows"))
        rules.open_gate(FLUSH)
        rules.await_gate(FLUSH + 1)
        second.savepoint(str(tmp_path / "rule"))
        rules.open_all()
        source.open_all()
        assert second.wait("4min") == "finished"

    names = ",".join(f"rule {x}" for x in range(6))
    expected = [row for k in range(5) for row in ((k, 20, "flush"), (k, 4, names))]
    assert rows(found.to_arrow()) == sorted(expected, key=repr)


class Buffers(tg.ProcessFunction):
    """Keeps rows until the end, in a list, and how many there were, in a union; tells all of that then."""

    def open(self, context: tg.ProcessContext) -> None:
        self.rows = context.list_state(tg.ListState("rows", pa.struct({"k": pa.int64(), "x": pa.int64()})))
        self.counts = context.union_list_state(tg.ListState("counts", pa.int64()))
        self.counts.update([sum(self.counts.get())] if context.subtask == 0 else [])

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        self.rows.add(row)
        self.counts.update([sum(self.counts.get()) + 1])

    def finish(self, context: tg.ProcessContext) -> Iterator[Row]:
        yield from self.rows.get()
        yield {"k": -1, "x": sum(self.counts.get())}


def buffered(env: tg.StreamEnvironment, source: GatedSource) -> tg.CollectedRows:
    """Rows that are kept in operator state, without keys."""
    stream = env.from_source(source, uid="rows").rebalance()
    return stream.process(Buffers(), schema=source.schema, uid="buffers").collect(uid="kept")


@pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
def test_lists_go_on_at_another_parallelism(tmp_path: Path, before: int, after: int, unaligned: bool) -> None:
    """No element is lost or doubled; of a union each subtask has made its part."""
    with opening(GatedSource(ROWS, ROWS, gates=[30])) as source, local(before) as env:
        buffered(env, source)
        settings = config(tmp_path, unaligned=unaligned)
        first = env.execute("test job", checkpoints=settings, restart=NO_RESTART)
        source.await_gate(30)
        path = first.trigger_checkpoint("4min")
        first.cancel()
    with opening(GatedSource(ROWS, ROWS)) as source, local(after) as env:
        found = buffered(env, source)
        # While one subtask has ended before the others no checkpoint can be taken: only the last one is.
        finish(env, tmp_path, restore=path, settings={"interval": None, "unaligned": unaligned})

    kept = [row for row in rows(found.to_arrow()) if row[0] != -1]
    counts = [x for k, x in rows(found.to_arrow()) if k == -1]
    assert rows(source.table()) == kept
    assert (after, 2 * ROWS) == (len(counts), sum(counts))


class Holds(tg.ProcessFunction):
    """Binds a list, or a union list, and leaves it empty."""

    def __init__(self, union: bool) -> None:
        self._union = union

    def open(self, context: tg.ProcessContext) -> None:
        (context.union_list_state if self._union else context.list_state)(tg.ListState("held", pa.int64()))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        yield row


@pytest.mark.parametrize("union", [False, True], ids=["list", "union"])
def test_a_union_refuses_checkpoints_while_some_subtasks_have_finished(tmp_path: Path, union: bool) -> None:
    """Nobody knows what a finished subtask had put into it, even if the others have nothing in it; else they go
    on.
    """
    with opening(GatedSource(5, ROWS, gates=[30])) as source, local() as env:
        env.from_source(source, uid="rows").process(Holds(union), schema=source.schema, uid="holds").collect()
        settings = config(tmp_path, tolerable_failed_checkpoints=100)
        job = env.execute("test job", checkpoints=settings, restart=NO_RESTART)
        source.await_gate(30)
        await_events(job, "TaskReachedEndOfData", 1)
        if union:
            with pytest.raises(tg.CheckpointError, match="union"):
                job.trigger_checkpoint("4min")
        else:
            job.trigger_checkpoint("4min")
        job.cancel()
        job.wait("4min")


class Tags(tg.BroadcastProcessFunction):
    """A function without keys."""

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        pass

    def process_broadcast(self, row: dict[str, Any], context: tg.BroadcastContext) -> None:
        pass


def test_streams_of_the_broadcast_pattern_are_checked_at_once() -> None:
    """Before anything runs: the second one is broadcast, and the function knows keys exactly if there are some."""
    with local() as env:
        a, b = (env.from_batches(pa.table({"k": [1], "x": [1]}), name=name) for name in "ab")
        keyed = a.key_by("k")
        assert keyed.connect(b.broadcast()).process(Rules(), schema=TOLD).schema == TOLD
        for first, second in [(keyed, b.key_by("k")), (keyed, b.broadcast().key_by("k")), (a, b), (a, b.rebalance())]:
            with pytest.raises(
                tg.ConfigurationError, match=r"Rules needs a broadcast second stream: a\.connect\(rules\.broad"
            ):
                first.connect(second).process(Rules())  # type: ignore[arg-type]
        with pytest.raises(tg.ConfigurationError, match=r"Rules is a .* the first stream has no keys: call key_by"):
            a.connect(b.broadcast()).process(Rules())
        with pytest.raises(tg.ConfigurationError, match=r"Tags is a .* has no keys, but .* is keyed by \['k'\]"):
            keyed.connect(b.broadcast()).process(Tags())
        with pytest.raises(tg.ConfigurationError, match="the same number of key columns"):
            keyed.connect(b)
        with pytest.raises(tg.ConfigurationError, match="the same number of key columns"):
            keyed.connect(b.broadcast()).process(PassesBoth())
        with pytest.raises(tg.ConfigurationError, match=r"derived from tg\.ProcessFunction"):
            keyed.process(Rules())  # type: ignore[arg-type]
        a.connect(b.broadcast()).process(Tags())
        a.connect(b.broadcast().union(b.broadcast())).process(Tags())


@pytest.mark.slow
def test_the_example_of_fraud_rules_finds_what_a_batch_computation_finds(tmp_path: Path) -> None:
    """Whatever order payments and limits come in, each is judged by the limit of its moment."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "fraud_rules.py"))
    payments, limits = example["day"](accounts=10, payments=800)
    changes = dict(zip(*(column.to_pylist() for column in limits.columns), strict=True))
    expected = set()
    for one in payments.to_pylist():
        spent = sum(
            other["amount"]
            for other in payments.to_pylist()
            if other["account"] == one["account"] and one["at"] - example["HOUR_MS"] < other["at"] <= one["at"]
        )
        limit = changes[max(since for since in changes if since <= one["at"])]
        if spent > limit:
            expected.add((one["account"], one["at"], spent, limit))
    assert expected

    with local() as env:
        found = example["alerts"](env, payments, limits).collect()
        finish(env, tmp_path)
    assert sorted(expected, key=repr) == rows(found.to_arrow())
