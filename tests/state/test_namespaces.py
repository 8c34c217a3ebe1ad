"""Tables with namespaces: rows of one are found and removed alone, and it has no part in the key group."""

from __future__ import annotations

import numpy as np
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from namespaces_model import GROUPS, KEYS, ROOM, Namespaces, check

from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.state.snapshot import Cut, StateTable


@pytest.mark.parametrize("kind", ["columnar", *ROOM])
@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "remove"]), st.lists(KEYS, min_size=1, max_size=12, unique=True))
        | st.tuples(st.just("drain"), st.tuples(st.integers(-3, 3), st.none() | st.integers(0, 7))),
        max_size=8,
    )
)
def test_each_namespace_has_its_rows(
    kind: str, steps: list[tuple[str, list[tuple[int, int]]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever comes and goes; and also when the rows were loaded."""
    subject = Namespaces(kind, str(tmp_path_factory.mktemp("db")))
    for what, value in steps:
        if what == "drain":
            namespace, first = value  # type: ignore[misc]
            groups = None if first is None else range(first, GROUPS)  # type: ignore[arg-type]
            expected = subject.expected(namespace, groups)  # type: ignore[arg-type]
            others = [other for other in (-2, 3) if other != namespace]
            if first == 1:
                expected_of = [(n, *row) for n in (namespace, *others) for row in subject.expected(n, groups)]  # type: ignore[arg-type]
                assert subject.of_several([namespace, *others], groups, drained=True) == sorted(expected_of)  # type: ignore[list-item]
                for n, k, _ in expected_of:
                    subject.model.pop((n, k))  # type: ignore[arg-type]
                expected = []
            else:
                assert subject.of(namespace, groups, drained=True) == expected  # type: ignore[arg-type]
            for k, _ in expected:
                del subject.model[namespace, k]  # type: ignore[arg-type]
        else:
            subject.put(value, removed=what == "remove")
        check(subject)
    tables = [table for state in subject.backend.freeze(Cut(CheckpointId(1))) for table in tables_of(state)]
    other = Namespaces("rocksdb with cache" if kind == "columnar" else "columnar", str(tmp_path_factory.mktemp("db")))
    load(other, tables)
    other.model = dict(subject.model)
    check(other)
    for each in (subject, other):
        each.backend.close()


@pytest.mark.parametrize("kind", ROOM)
@settings(max_examples=40)
@given(
    rounds=st.lists(
        st.tuples(st.lists(KEYS, min_size=1, max_size=12, unique=True), st.none() | st.integers(-3, 3)),
        min_size=2,
        max_size=6,
    )
)
def test_changes_since_a_base_have_drained_rows(
    kind: str, rounds: list[tuple[list[tuple[int, int]], int | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A snapshot on the one before it has each new row and each removed key, and no drained namespace stays."""
    subject = Namespaces(kind, str(tmp_path_factory.mktemp("db")), keeps_changes=True)
    stored: dict[tuple[int, int], int] = {}
    for number, (keys, drained) in enumerate(rounds, start=1):
        subject.put(keys)
        if drained is not None:
            for k, _ in subject.of(drained, drained=True):
                del subject.model[drained, k]
        base = CheckpointId(number - 1) if number > 1 else None
        for state in subject.backend.freeze(Cut(CheckpointId(number), base)):
            for row in (row for table in tables_of(state) for row in table.rows.to_pylist()):
                if state.removed:
                    stored.pop((row["namespace"], row["k"]), None)
                else:
                    stored[row["namespace"], row["k"]] = row["n"]
        assert stored == subject.model
    subject.backend.close()


def load(subject: Namespaces, tables: list[StateTable]) -> None:
    """Load stored tables, whose rows are in the key groups of their keys alone."""
    for table in tables:
        groups = key_groups_of(hash_columns(table.rows, ["k"]), GROUPS)
        assert np.all(np.diff(groups.astype(np.int64)) >= 0)
        subject.backend.load(table)
    subject.backend.loaded()


def test_slots_that_move_are_found() -> None:
    """When dead slots are dropped, those of the living get other numbers."""
    subject = Namespaces("columnar", "")
    subject.put([(n, k) for n in range(4) for k in range(3_000)])
    for namespace in range(3):
        assert len(subject.of(namespace, drained=True)) == 3_000
        subject.model = {key: number for key, number in subject.model.items() if key[0] != namespace}
    assert subject.of(3) == subject.expected(3)
    assert subject.table.namespaces().tolist() == [3]
