"""The changelog of a task: what is written, what a snapshot refers to, and what may be deleted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.task.incremental_base import Chain, ChangeLog, ChangelogLimits
from tidegate.storage.checkpoints.metadata import StateHandle
from tidegate.storage.errors import ProtocolError
from tidegate.storage.state.snapshot import Cut


def handle(name: str, size_bytes: int = 10) -> StateHandle:
    """A file of the log."""
    return StateHandle(f"job/shared/log/{name}", None, size_bytes, "xxh3:0", ())


def paths(chain: Chain) -> list[str]:
    """Last parts of the names of a chain's files."""
    return [str(h.path).rpartition("/")[2] for h in chain.handles]


def test_the_first_thing_written_is_a_base() -> None:
    """There is nothing to build on; segments follow, each on the one before it."""
    log = ChangeLog()
    assert [Cut(1), Cut(2, base=1), Cut(3, base=2)] == [log.seal(), log.seal(), log.seal()]


def test_a_restored_log_goes_on_above_its_layers() -> None:
    """The layers of the checkpoint stay the base, and the first segment holds what has changed since."""
    log = ChangeLog((handle("old-base"), handle("old-delta")))
    assert Cut(1, base=0) == log.seal()
    chain = log.take()
    log.written(1, False, handle("s1"))
    assert paths(chain) == ["old-base", "old-delta", "s1"]


def test_a_snapshot_is_durable_with_all_its_layers() -> None:
    """Neither a base nor a segment below may be missing; one that was empty has no file."""
    log = ChangeLog()
    log.seal()
    log.seal()
    chain = log.take()
    log.written(2, False, handle("s2"))
    assert not chain.durable
    log.written(1, True, handle("b1"))
    assert chain.durable
    assert paths(chain) == ["b1", "s2"]
    log.seal()
    empty = log.take()
    log.written(3, False, None)
    assert paths(empty) == ["b1", "s2"]


def test_a_new_base_leaves_out_what_lies_below_once_it_is_durable() -> None:
    """Before, chains go on over the old base; the task deletes only what no snapshot had taken."""
    log = ChangeLog()
    log.seal()
    log.written(1, True, handle("b1"))
    log.take()
    log.seal()
    log.written(2, False, handle("s2"))
    assert (Cut(3, base=2), Cut(3)) == log.seal_with_base()
    log.written(3, False, handle("s3"))
    log.seal()
    log.written(4, False, handle("s4"))
    assert paths(log.chain) == ["b1", "s2", "s3", "s4"]
    assert [handle("s2"), handle("s3")] == log.written(3, True, handle("b3"))
    assert paths(log.chain) == ["b3", "s4"]


def test_a_base_may_be_durable_before_the_segment_of_its_moment() -> None:
    """A snapshot that has the segment in its chain still waits for it; nobody else does."""
    log = ChangeLog()
    log.seal()
    log.written(1, True, handle("b1"))
    log.seal_with_base()
    old = log.take()
    assert log.written(2, True, handle("b2")) == []
    assert paths(log.chain) == ["b2"]
    assert not old.durable
    assert log.written(2, False, handle("s2")) == []
    assert paths(old) == ["b1", "s2"]


def test_after_a_segment_that_failed_a_base_is_written() -> None:
    """Chains through it fail, those before it do not, and nothing builds on it."""
    log = ChangeLog()
    log.seal()
    log.written(1, True, handle("b1"))
    log.seal()
    before = log.take()
    log.seal()
    through = log.take()
    log.failed(3, False)
    assert through.failed
    assert not before.failed
    log.written(2, False, handle("s2"))
    assert paths(before) == ["b1", "s2"]
    assert Cut(4) == log.seal()


def test_a_failed_segment_is_mended_by_a_base_that_is_on_its_way() -> None:
    """A base of a later moment holds what was in it; if that fails too, the log begins anew."""
    for base_comes in (True, False):
        log = ChangeLog()
        log.seal()
        log.written(1, True, handle("b1"))
        log.seal()
        log.seal_with_base()
        log.failed(2, False)
        log.written(3, False, handle("s3"))
        if base_comes:
            assert [handle("b1"), handle("s3")] == log.written(3, True, handle("b3"))
            assert paths(log.chain) == ["b3"]
        else:
            assert [handle("b1"), handle("s3")] == log.failed(3, True)
            assert Cut(4) == log.seal()


def test_limits() -> None:
    """A segment is begun for enough changes while few are in flight; a base when segments outweigh the old one."""
    log = ChangeLog(limits=ChangelogLimits(segment_bytes=100, in_flight_max=1, layers_max=5, bytes_min=15))
    log.seal()
    assert not log.wants_base()
    log.written(1, True, handle("b1", 20))
    assert log.wants_segment(100)
    assert not log.wants_segment(99)
    log.seal()
    assert not log.wants_segment(100)
    log.written(2, False, handle("s2", 20))
    assert not log.wants_base()
    log.seal()
    log.written(3, False, handle("s3", 1))
    assert log.wants_base()
    log.seal_with_base()
    assert not log.wants_base()
    many = ChangeLog(tuple(handle(f"l{n}", 1) for n in range(4)), ChangelogLimits(layers_max=5))
    many.seal()
    assert many.wants_base()


def test_after_a_failure_no_state_is_written_whole_before_a_snapshot_asks() -> None:
    """A storage that takes no bases would have the whole state encoded again and again, without any rest."""
    log = ChangeLog(limits=ChangelogLimits(segment_bytes=100, layers_max=2, bytes_min=15))
    log.seal()
    log.written(1, True, handle("b1"))
    log.seal()
    log.written(2, False, handle("s2", 100))
    assert log.wants_base()
    log.seal_with_base()
    log.failed(3, True)
    log.written(3, False, None)
    assert not log.wants_base()
    assert log.wants_segment(100)
    log.seal()
    log.take()
    assert log.wants_base()

    log.failed(4, False)
    assert not log.wants_segment(100)
    assert Cut(5) == log.seal()


def test_layers_are_bounded_where_no_base_can_be_written() -> None:
    """In the end a snapshot waits for a base, and fails with it; what no snapshot has taken is deleted."""
    log = ChangeLog(limits=ChangelogLimits(layers_max=2))
    log.seal()
    log.written(1, True, handle("b1"))
    log.take()
    for number in (2, 3):
        log.seal_with_base()
        assert log.failed(number, True) == []
        assert log.written(number, False, handle(f"s{number}")) == []
    assert Cut(4, base=3) == log.seal()
    log.written(4, False, handle("s4"))
    assert Cut(5) == log.seal()
    snapshot = log.take()
    assert [handle("s2"), handle("s3"), handle("s4")] == log.failed(5, True)
    assert snapshot.failed


def test_a_log_that_starts_anew_comes_back_to_nothing() -> None:
    """The next thing written is a base; what no snapshot has taken is the task's to delete, durable now or later."""
    log = ChangeLog()
    for _ in range(4):
        if log.seal().checkpoint_id == 2:
            log.take()
    for number in (1, 2, 3):
        log.written(number, number == 1, handle(f"s{number}"))

    log.start_anew()

    assert log.seal() == Cut(5)
    assert [h.path for h in log.written(4, False, handle("s4"))] == [handle(n).path for n in ("s3", "s4")]
    chain = log.take()
    log.written(5, True, handle("b5"))
    assert paths(chain) == ["b5"]


def test_what_is_not_being_written_cannot_come() -> None:
    """Twice, or a number that was never given: the runtime is broken."""
    log = ChangeLog()
    log.seal()
    log.written(1, True, handle("b1"))
    for number, whole in ((1, True), (2, False), (1, False)):
        with pytest.raises(ProtocolError):
            log.written(number, whole, None)


@given(st.data())
def test_chains_are_whole_and_nothing_they_refer_to_is_deleted(data: st.DataObject) -> None:
    """Whatever comes in which order: a durable chain holds every change, and its files are nobody's to delete."""
    log = ChangeLog(limits=ChangelogLimits(layers_max=data.draw(st.integers(1, 4))))
    writing: dict[tuple[int, bool], tuple[int, int]] = {}
    covers: dict[str, tuple[int, int]] = {}
    deleted: set[str] = set()
    taken: list[tuple[int, Chain]] = []

    def begin(cut: Cut) -> None:
        number = int(cut.checkpoint_id)
        base = -1 if cut.base is None else int(cut.base)
        writing[number, cut.base is None] = (0 if cut.base is None else base, number)

    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["seal", "snapshot", "base", "written", "failed"]))
        if step in ("seal", "snapshot"):
            cut = log.seal()
            begin(cut)
            if step == "snapshot":
                taken.append((int(cut.checkpoint_id), log.take()))
        elif step == "base" and log.may_replace_base:
            for cut in log.seal_with_base():
                begin(cut)
        elif step in ("written", "failed") and writing:
            number, whole = data.draw(st.sampled_from(sorted(writing)))
            span = writing.pop((number, whole))
            name = f"{'b' if whole else 's'}{number}"
            covers[name] = span
            gone = log.failed(number, whole) if step == "failed" else log.written(number, whole, handle(name))
            deleted |= {str(h.path).rpartition("/")[2] for h in gone}
        for number, chain in taken:
            if chain.durable:
                names = paths(chain)
                spans = [covers[name] for name in names]
                assert spans[0][0] == 0
                assert number == spans[-1][1]
                assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
                assert not deleted & set(names)
