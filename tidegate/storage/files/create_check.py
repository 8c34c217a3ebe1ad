"""Tests conditional creates before a job begins: fencing and completing checkpoints rest on them.

Rules:

- A name that is taken is refused, and what is there stays. Tried one after the other, at every place that a job uses.
- Of two who create one name at the same time exactly one wins, and what it wrote is there. A store that looks first and
  puts then passes the first test and fails this one, now and then: so many pairs race, in several rounds. What decides
  is the server or the disk, so this is done once a process for each of them.
- An answer that is missing proves nothing: it neither counts as a winner nor as a loser.
- What the test has created it deletes.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

from tidegate.storage.errors import AlreadyExistsError, ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.store import Store

PAIRS = 4
ROUNDS = 5
"""Of 30 races of eight on a store that was seen to look and then put, 19 had several winners. So about one of four
pairs has two, and all twenty pairs have one winner once in 300 tests. Pairs find as much with as many requests as
larger races do, and are sooner over: some servers let all who want one name wait for each other."""
REQUESTS_MAX = 4 + PAIRS * (3 * ROUNDS + 1)

_found_atomic: set[tuple[type, str]] = set()
"""Servers and disks that have passed the races in this process."""


def check_conditional_create(store: Store) -> None:
    """See that creates of one name have one winner, one after the other and at the same time.

    Raises ConfigurationError if they have not: two coordinators could then both own a job. StorageError if the storage
    does not answer. At most `REQUESTS_MAX` requests.
    """
    path = f"_tidegate-probe-{uuid.uuid4().hex}"
    _check_one_after_the_other(store, path)
    if getattr(store, "for_one_thread", False):
        return
    place = (type(store), store.place) if isinstance(store, FileSystemStore) else None
    if place in _found_atomic:
        return
    _check_at_the_same_time(store, path)
    if place is not None:
        _found_atomic.add(place)


def _check_one_after_the_other(store: Store, path: str) -> None:
    store.create(path, b"first")
    try:
        try:
            store.create(path, b"second")
            refused = False
        except AlreadyExistsError:
            refused = True
        if not refused or store.read(path) != b"first":
            raise _refusal(store, "a put with `If-None-Match: *` replaced a file")
    finally:
        store.delete(path)


def _check_at_the_same_time(store: Store, prefix: str) -> None:
    rounds = [[f"{prefix}-race-{number}-{pair}" for pair in range(PAIRS)] for number in range(ROUNDS)]
    decided = 0
    with ThreadPoolExecutor(2 * PAIRS, "tidegate-probe") as pool:
        try:
            for number, paths in enumerate(rounds, start=1):
                outcomes = list(pool.map(partial(_create, store), [p for p in paths for _ in (1, 2)], [1, 2] * PAIRS))
                winners = [_winner(store, path, outcomes[2 * i : 2 * i + 2]) for i, path in enumerate(paths)]
                decided += sum(winner is not None for winner in winners)
                if number < ROUNDS:
                    continue
                if not decided:
                    raise next(outcome for outcome in outcomes if isinstance(outcome, StorageError))
                for path, winner in zip(paths, winners, strict=True):
                    if winner is not None and store.read(path) != _mark(winner):
                        raise _refusal(store, f"{path} was replaced after its creator had won")
        finally:
            for _ in pool.map(store.delete, chain.from_iterable(rounds)):
                pass


def _create(store: Store, path: str, creator: int) -> bool | StorageError:
    """Whether a creator has won, or why that is not known."""
    try:
        store.create(path, _mark(creator))
    except AlreadyExistsError:
        return False
    except StorageError as error:
        return error
    return True


def _winner(store: Store, path: str, outcomes: Sequence[bool | StorageError]) -> int | None:
    """Which of two creators has won; None if that is not known."""
    winners = [creator for creator, outcome in enumerate(outcomes, start=1) if outcome is True]
    unanswered = [outcome for outcome in outcomes if isinstance(outcome, StorageError)]
    if len(winners) > 1 or not (winners or unanswered):
        raise _refusal(store, f"of two who created {path} at the same time {'both' if winners else 'none'} won")
    return winners[0] if winners else None


def _mark(creator: int) -> bytes:
    return f"creator {creator}".encode()


def _refusal(store: Store, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the storage at {store.url} has no conditional create that can be relied on ({why}): exactly-once cannot be "
        "kept on it. Use a local folder, AWS S3, or an S3 server that supports it"
    )
