"""State of queries: a program with the same text finds it again, and one with a `uid` if the query is still alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening
from programs import nodes_of
from sql_streams import environment

import tidegate as tg

ROWS, GATE = 40, 15
TOTALS = "SELECT k, COUNT(*) AS n, SUM(x) AS total FROM numbers GROUP BY k"


def _run(
    source: GatedSource, folder: Path, query: str, uid: str | None, restore: str | None
) -> list[tuple[int, int, int]] | str:
    """Run a query up to the gate, and return a savepoint; or from there to its end, and return what it gives."""
    with opening(source), local() as env:
        env.create_temporary_view("numbers", env.from_source(source, uid="numbers"))
        rows = env.sql(query, emit="final", uid=uid)
        table = rows.to_table(str(folder / "totals"), uid="totals")
        job = env.execute("sql", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=restore)
        if restore is None:
            source.await_gate(GATE)
            return job.stop(savepoint=str(folder / "savepoints"))
        assert job.wait("4min") == "finished"
        return sorted(table.to_polars().rows())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uid", "later"),
    [
        (None, "  SELECT k, COUNT(*) AS n, -- how many\n SUM(x) AS total FROM numbers GROUP BY k;"),
        ("totals-query", "SELECT k, COUNT(*) AS n, SUM(x) AS total FROM numbers WHERE x < 1000 GROUP BY k"),
    ],
)
def test_a_query_goes_on_from_a_savepoint(tmp_path: Path, uid: str | None, later: str) -> None:
    """With the same text but for blanks and comments, or with a uid and another condition."""
    path = _run(GatedSource(ROWS, ROWS, gates=[GATE]), tmp_path, TOTALS, uid, None)
    source = GatedSource(ROWS, ROWS)
    expected = [(k, 16, 2 * sum(range(k, ROWS, 5))) for k in range(5)]
    assert isinstance(path, str)
    assert _run(source, tmp_path, later, uid, path) == expected


def test_another_text_does_not_take_the_state_for_its_own(tmp_path: Path) -> None:
    """State that no operator asks for is refused, as of any program."""
    path = _run(GatedSource(ROWS, gates=[GATE]), tmp_path, TOTALS, None, None)
    assert isinstance(path, str)
    with pytest.raises(tg.TidegateError, match="sql-"):
        _run(GatedSource(ROWS), tmp_path, TOTALS.replace("SUM", "MAX"), None, path)


def test_a_limit_goes_on_counting_from_a_savepoint(tmp_path: Path) -> None:
    """Rows that passed before count, and a limit of another number of rows does not take the count for its own."""
    query = "SELECT k, x FROM numbers LIMIT {}"
    path = _run(GatedSource(ROWS, ROWS, gates=[GATE]), tmp_path, query.format(50), "first", None)
    assert isinstance(path, str)
    with pytest.raises(tg.IncompatibleStateError, match="50"):
        _run(GatedSource(ROWS, ROWS), tmp_path, query.format(60), "first", path)
    before = tg.open_table(str(tmp_path / "totals")).to_polars().height
    assert 0 < before < 50
    found = _run(GatedSource(ROWS, ROWS), tmp_path, query.format(50), "first", path)
    assert len(found) == 50


def test_uids_depend_on_the_query_alone() -> None:
    """Not on the steps before it; two queries of one text are told apart."""

    def uids(*before: str) -> list[str]:
        with environment() as env:
            for query in before:
                env.sql(query)
            known = len(nodes_of(env))
            env.sql("SELECT auction, COUNT(*) AS n FROM bids JOIN auctions ON auction = id GROUP BY auction")
            return [str(node.uid) for node in nodes_of(env)[known:]]

    alone = uids()
    assert alone == uids("SELECT auction FROM bids")
    assert len(set(alone)) == len(alone)
    assert all(uid.startswith("sql-") for uid in alone)
    join, aggregate = (next(uid for uid in alone if f"-{kind}-1" in uid) for kind in ("join", "aggregate"))
    assert (join.removesuffix("-join-1"), join) == (aggregate.removesuffix("-aggregate-1"), join)
