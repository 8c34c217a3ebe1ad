"""State as Spark DataFrames: read by executors from a checkpoint, and put into a savepoint."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate import recovery
from tidegate.spark_bridge import RayDPSession

KEYS = 1_000


def key_of(number: int) -> tuple[dt.date, str | None]:
    """A key of two columns, one of them null for some."""
    return dt.date(2024, 1, 1) + dt.timedelta(number % 30), None if number < 30 else f"n{number}"


@pytest.fixture
def savepoint(tmp_path: Path) -> str:
    """State of an operator by key, in three subtasks, and state of subtasks."""
    days, names = zip(*map(key_of, range(KEYS)), strict=True)
    keys = {"day": pa.array(days, pa.date32()), "name": pa.array(names, pa.string())}
    lists = pa.table({**keys, "seen": [[number, number + 1] for number in range(KEYS)]})
    with recovery.SavepointWriter(str(tmp_path), job="frames", max_parallelism=16, parallelism=3) as writer:
        writer.with_keyed_state(
            uid="u", keys=["day", "name"], state=tg.ValueState("n", int), rows=pa.table({**keys, "n": range(KEYS)})
        )
        writer.with_keyed_state(uid="u", keys=["day", "name"], state=tg.ListState("seen", int), rows=lists)
        writer.with_operator_state(uid="u", state=tg.ListState("list", int), rows=pa.table({"list": range(10)}))
    return writer.path


def test_executors_read_state_by_key_group(raydp_session: RayDPSession, savepoint: str) -> None:
    """All rows, in several partitions that share no key; columns have the types of the keys."""
    df = recovery.read_state(savepoint, uid="u", state="n", spark=raydp_session.spark)

    assert df.dtypes == [("day", "date"), ("name", "string"), ("n", "bigint")]
    assert df.rdd.getNumPartitions() > 1
    found = {(row["day"], row["name"]): row["n"] for row in df.collect()}
    assert found == {key_of(number): number for number in range(KEYS)}
    by_partition = df.groupBy("day", "name").count().where("count > 1").count()
    assert by_partition == 0
    few = recovery.read_state(savepoint, uid="u", state="n", key_groups=range(3), spark=raydp_session.spark)
    assert 0 < few.count() < KEYS
    seen = recovery.read_state(savepoint, uid="u", state="seen", spark=raydp_session.spark)
    assert {tuple(row["seen"]) for row in seen.collect()} == {(number, number + 1) for number in range(KEYS)}
    of_subtasks = recovery.read_state(savepoint, uid="u", state="list", spark=raydp_session.spark)
    assert sorted(row["list"] for row in of_subtasks.collect()) == list(range(10))


def test_a_dataframe_repairs_a_savepoint(raydp_session: RayDPSession, savepoint: str, tmp_path: Path) -> None:
    """What SQL makes of a state is put back; the rest of the savepoint stays."""
    df = recovery.read_state(savepoint, uid="u", state="n", spark=raydp_session.spark)
    repaired: Any = df.where("n % 2 = 0").selectExpr("day", "name", "n + 1000 AS n")

    with recovery.SavepointWriter(str(tmp_path / "repaired"), base=savepoint) as writer:
        writer.with_keyed_state(uid="u", keys=["day", "name"], state=tg.ValueState("n", int), rows=repaired)

    rows = recovery.read_state(writer.path, uid="u", state="n").to_pylist()
    found = {(row["day"], row["name"]): row["n"] for row in rows}
    assert found == {key_of(number): number + 1_000 for number in range(0, KEYS, 2)}
    (operator,) = recovery.diff(savepoint, writer.path, keys=True).operators
    keys = {state.state: state.keys for state in operator.states}
    assert keys["n"] == recovery.KeyChanges(added=0, removed=KEYS // 2, changed=KEYS // 2, same=0)
    assert keys["seen"] == recovery.KeyChanges(0, 0, 0, KEYS)


def test_state_in_memory_is_refused(raydp_session: RayDPSession) -> None:
    """Executors are other processes."""
    with pytest.raises(tg.ConfigurationError, match="executors cannot read"):
        recovery.read_state("memory://checkpoints/job-1a2b3c4d/chk-1", uid="u", spark=raydp_session.spark)
