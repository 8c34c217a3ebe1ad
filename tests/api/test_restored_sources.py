"""A restored source reads on where it was, so it has to be the source that it was."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, await_events, config, local, opening

import tidegate as tg

ROWS, STOP = 30, 10
DATA = pa.table({"k": list(range(50)), "x": list(range(1000, 1050))}, GatedSource.schema)


def program(env: tg.StreamEnvironment, source: GatedSource, folder: Path, data: pa.Table = DATA) -> tg.OutputTable:
    """Rows in memory, which end early, and those of a source that stops."""
    memory = env.from_batches(data, uid="memory", parallelism=min(env.parallelism, 3))
    return memory.union(env.from_source(source, uid="source")).to_table(str(folder / "out"), uid="out")


def interrupt(folder: Path, *lengths: int, stop: int = STOP, restore: str | None = None) -> None:
    """Cancelled at a checkpoint, with the rows in memory at their end."""
    with opening(GatedSource(*lengths, gates=[stop])) as source, local(2) as env:
        program(env, source, folder)
        job = env.execute("job", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=restore)
        source.await_gate(stop)
        if restore is None:
            await_events(job, "TaskReachedEndOfData", 2)
        job.trigger_checkpoint("4min")
        job.cancel()
        assert job.wait("4min") == "cancelled"


def resume(folder: Path, *lengths: int, parallelism: int = 2, data: pa.Table = DATA) -> list[int]:
    """Go on from the newest checkpoint to the end; the values in the table then."""
    with local(parallelism) as env:
        table = program(env, GatedSource(*lengths), folder, data)
        job = env.execute("job", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore="latest")
        assert job.wait("4min") == "finished"
    return sorted(table.to_arrow()["x"].to_pylist())


@pytest.mark.parametrize(
    ("lengths", "split"),
    [
        pytest.param((ROWS, ROWS, ROWS), "split 2", id="added"),
        pytest.param((ROWS,), "split 1", id="removed"),
        pytest.param((ROWS, ROWS + 1), "split 1", id="changed"),
    ],
)
def test_other_splits_are_refused(tmp_path: Path, lengths: tuple[int, ...], split: str) -> None:
    """Rows would be skipped without a word; the error names source and split, and the right source goes on."""
    interrupt(tmp_path, ROWS, ROWS)

    with pytest.raises(tg.ConfigurationError, match=f"source 'source' is not what it was .*: split '{split}' and 0 mo"):
        resume(tmp_path, *lengths)

    assert resume(tmp_path, ROWS, ROWS) == sorted([*range(ROWS), *range(ROWS), *range(1000, 1050)])


def test_other_data_in_memory_is_refused(tmp_path: Path) -> None:
    """Also where the source had finished: rows that came later would never be read."""
    interrupt(tmp_path, ROWS)

    with pytest.raises(tg.ConfigurationError, match=r"source 'memory' is not what it was"):
        resume(tmp_path, ROWS, data=pa.concat_tables([DATA, DATA]))


def test_a_finished_job_with_more_data_is_refused(tmp_path: Path) -> None:
    """Its final checkpoint says that all splits are at their end; the new rows would be left out."""
    resume(tmp_path, ROWS)

    with pytest.raises(tg.ConfigurationError, match=r"source 'memory' is not what it was"):
        resume(tmp_path, ROWS, data=pa.concat_tables([DATA, DATA]))


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_another_parallelism_is_the_same_source(tmp_path: Path, parallelism: int) -> None:
    """Splits do not depend on it."""
    interrupt(tmp_path, ROWS, ROWS)

    assert resume(tmp_path, ROWS, ROWS, parallelism=parallelism) == sorted(
        [*range(ROWS), *range(ROWS), *range(1000, 1050)]
    )


def test_a_source_that_had_finished_is_known_to_the_next_checkpoint(tmp_path: Path) -> None:
    """Restored as finished, it is in the checkpoints of the restored job too, with the splits that it had."""
    interrupt(tmp_path, ROWS, ROWS)
    interrupt(tmp_path, ROWS, ROWS, stop=STOP + 10, restore="latest")

    assert resume(tmp_path, ROWS, ROWS, parallelism=3) == sorted([*range(ROWS), *range(ROWS), *range(1000, 1050)])


def test_other_rows_in_memory_are_refused(tmp_path: Path) -> None:
    """A job with rows of two inputs would be wrong. Their number is the same, so only the values show it."""
    interrupt(tmp_path, ROWS, ROWS)
    changed = DATA.set_column(1, "x", pa.array(range(2000, 2050)))
    reordered = DATA.take(list(reversed(range(50))))

    for other in (changed, reordered):
        with pytest.raises(
            tg.ConfigurationError, match=r"source 'memory' is not what it was .* give it the same input"
        ):
            resume(tmp_path, ROWS, ROWS, data=other.cast(DATA.schema))

    again = pa.concat_tables([DATA.slice(0, 7), DATA.slice(7)])
    assert resume(tmp_path, ROWS, ROWS, data=again) == sorted([*range(ROWS), *range(ROWS), *range(1000, 1050)])
