"""What a checkpoint holds, and what has changed from one to another, from Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoints_on_disk import UID, complete
from command_line import CommandRunner
from layers_on_disk import STATE, complete_layer
from local_jobs import GatedSource, opening
from typer.testing import Result

import tidegate as tg
from tidegate import recovery
from tidegate.cli.main import app
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.files.file_system_store import FileSystemStore, open_store

JOB = "demo-1a2b3c4d"


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """An empty root."""
    return open_store(str(tmp_path))


def run(*arguments: str) -> Result:
    """Run the command."""
    return CommandRunner().invoke(app, list(arguments))


def path_of(store: FileSystemStore, number: int) -> str:
    """Where a checkpoint is."""
    return f"{store.url}/{JOB}/chk-{number}"


def test_operators_have_sizes_and_states(store: FileSystemStore) -> None:
    """Parallelism, bytes, what has finished, and each state with its kind and rows."""
    complete(store, JOB, 1, parallelism=4)

    (operator,) = recovery.inspect(path_of(store, 1)).operators

    assert (operator.uid, operator.parallelism, operator.max_parallelism) == (UID, 4, 8)
    assert (operator.finished_subtasks, operator.finished) == (0, False)
    (state,) = operator.states
    assert (state.state, state.kind, state.rows, state.subtasks) == ("n", StateKind.KEYED, 16, 4)
    assert operator.size_bytes == state.size_bytes
    assert state.size_bytes is not None
    assert state.size_bytes > 0


def test_a_store_of_ones_own_is_used(store: FileSystemStore) -> None:
    """`inspect` and `diff` open storage as they are told to."""
    complete(store, JOB, 1)
    asked: list[str] = []

    def opened(url: str) -> FileSystemStore:
        asked.append(url)
        return store

    recovery.inspect(f"nowhere/{JOB}/chk-1", open_store=opened)
    recovery.diff(f"nowhere/{JOB}/chk-1", f"nowhere/{JOB}/chk-1", open_store=opened)

    assert set(asked) == {"nowhere"}


def test_changed_keys_are_counted_through_layers(store: FileSystemStore) -> None:
    """Of a state in layers: what came, what went, what has another value, and what is the same."""
    first = complete_layer(store, JOB, 1, {1: 10, 2: 20, 3: 30, 4: 40})
    complete_layer(store, JOB, 2, {2: 21, 5: 50, 6: 60}, removed=[1], base=first)

    found = recovery.diff(path_of(store, 1), path_of(store, 2), keys=True)

    (operator,) = found.operators
    states = {state.state: state for state in operator.states}
    assert states[STATE].keys == recovery.KeyChanges(added=2, removed=1, changed=1, same=2)
    assert states[STATE].change == "changed"
    assert states["n"].change == "same"
    assert found.changed == (operator,)


def test_other_values_of_the_same_size_are_a_change(store: FileSystemStore) -> None:
    """Every key has another value, and nothing else differs: not the number of rows, and no size."""
    complete_layer(store, JOB, 1, {1: 10, 2: 20})
    complete_layer(store, JOB, 2, {1: 11, 2: 21})

    (operator,) = recovery.diff(path_of(store, 1), path_of(store, 2)).operators

    assert operator.size_bytes[0] == operator.size_bytes[1]
    assert operator.change == "changed"
    assert {state.state: state.change for state in operator.states} == {STATE: "changed", "n": "same"}


def test_positions_of_sources_are_compared(tmp_path: Path) -> None:
    """Two savepoints of one job: the sums have other values, and the source stands at another row."""
    paths = []
    with opening(GatedSource(30, gates=[10, 20])) as gated, tg.StreamEnvironment.local() as env:
        rows = env.from_source(gated, uid="rows")
        sums = rows.key_by("k").aggregate(total=tg.sum("x"), uid="sums")
        sums.to_table(str(tmp_path / "out"), mode="upsert", keys=["k"])
        job = env.execute("gated", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "checkpoints")))
        for gate in (10, 20):
            gated.await_gate(gate)
            paths.append(job.savepoint(str(tmp_path / "saved")))
            gated.open_gate(gate)
        job.wait("5min")

    found = {operator.uid: operator for operator in recovery.diff(*paths).operators}

    assert found["rows"].splits == (recovery.SplitDiff("split 0", (10, 20)),)
    assert (found["rows"].change, found["sums"].change) == ("changed", "changed")
    assert "10 -> 20" in run("checkpoints", "diff", *paths).output


def test_equal_checkpoints_differ_in_nothing(store: FileSystemStore) -> None:
    """The same state twice is the same, with keys and without."""
    for number in (1, 2):
        complete(store, JOB, number)

    assert recovery.diff(path_of(store, 1), path_of(store, 2)).changed == ()
    found = recovery.diff(path_of(store, 1), path_of(store, 2), keys=False)
    assert [operator.change for operator in found.operators] == ["same"]
    assert "1 operators are the same" in run("checkpoints", "diff", path_of(store, 1), path_of(store, 2)).output


def test_another_parallelism_is_a_change(store: FileSystemStore) -> None:
    """Both values are told."""
    complete(store, JOB, 1, parallelism=2)
    complete(store, JOB, 2, parallelism=4)

    result = run("checkpoints", "diff", path_of(store, 1), path_of(store, 2), "--json")

    (operator,) = json.loads(result.output)["operators"]
    assert operator["parallelism"] == [2, 4]
    assert operator["change"] == "changed"
    assert "2 -> 4" in run("checkpoints", "diff", path_of(store, 1), path_of(store, 2)).output


@pytest.mark.parametrize("command", ["list", "show", "inspect", "verify"])
def test_commands_answer_in_json(store: FileSystemStore, command: str) -> None:
    """One line that a program can read."""
    complete(store, JOB, 1)

    result = run("checkpoints", command, store.url if command == "list" else path_of(store, 1), "--json")

    assert result.exit_code == 0, result.output
    assert result.output.count("\n") == 1
    found = json.loads(result.output)
    found = found[0] if command == "list" else found
    assert found["path"] == path_of(store, 1)


def test_inspect_shows_operators_and_states(store: FileSystemStore) -> None:
    """A row a state, layers told."""
    complete_layer(store, JOB, 2, {1: 1}, base=complete_layer(store, JOB, 1, {1: 1, 2: 2}))

    output = run("checkpoints", "inspect", path_of(store, 2)).output

    assert str(UID) in output
    assert "layers" in output


def test_state_is_read_from_the_shell(store: FileSystemStore, tmp_path: Path) -> None:
    """Some rows on the terminal, all of them in a file; a wrong name is an error with what there is."""
    complete_layer(store, JOB, 1, {1: 10, 2: 20})
    where = ("state", "read", path_of(store, 1), "--uid", str(UID))

    rows = run(*where, "--state", STATE, "--json").output.splitlines()
    assert sorted((json.loads(row) for row in rows), key=lambda row: row["k"]) == [{"k": 1, "v": 10}, {"k": 2, "v": 20}]
    assert run(*where, "--state", STATE, "--rows", "1").output.count("\n") == 2
    assert "2 rows are in" in run(*where, "--state", STATE, "--out", str(tmp_path / "rows.parquet")).output
    wrong = run(*where, "--state", "totals")
    assert wrong.exit_code == 2
    assert "did you mean 'total'?" in wrong.output


def test_a_state_with_a_new_column_is_compared_without_it(tmp_path: Path) -> None:
    """A program with one more aggregate has gone on from a savepoint: old keys are compared, the column is named."""
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    tables = {old: {"k": [1, 2], "n": [5, 6]}, new: {"k": [1, 2, 3], "n": [5, 7, 1], "high": [9, 9, 9]}}
    paths = []
    for target, rows in tables.items():
        with recovery.SavepointWriter(target, job="j", max_parallelism=128) as savepoint:
            savepoint.with_keyed_state(uid="agg", keys=["k"], state="aggregate", rows=pa.table(rows))
        paths.append(savepoint.path)

    (state,) = recovery.diff(*paths, keys=True).operators[0].states
    assert (state.keys, state.change) == (recovery.KeyChanges(1, 0, 1, 1), "changed")
    assert (state.added_columns, state.removed_columns) == (("high",), ())
    (state,) = recovery.diff(*reversed(paths), keys=True).operators[0].states
    assert (state.added_columns, state.removed_columns) == ((), ("high",))
