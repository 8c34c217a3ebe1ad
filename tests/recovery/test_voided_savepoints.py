"""A savepoint that a replaced coordinator copies, and its successor gives up: one is first, and both know which."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from any_permit import ANY_PERMIT, any_permit
from checkpoints_on_disk import complete
from stores import opened_like

from tidegate.api.submission.restoring import check_not_given_up
from tidegate.recovery.checkpoints import list_checkpoints, verify
from tidegate.recovery.deletion import delete
from tidegate.recovery.savepoints import void_savepoint, write_savepoint
from tidegate.storage.checkpoints.layout import METADATA_NAME
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, encode_metadata, read_metadata
from tidegate.storage.errors import ConfigurationError, FencedError, SavepointStoppedError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.files.store import Buffer, WrappedStore
from tidegate.storage.ids import CheckpointId, JobId

JOB, SEVEN = JobId("demo-1a2b3c4d"), CheckpointId(7)
FOLDER = f"savepoint-{JOB}-7"


class World:
    """A store with checkpoint 7, and the two coordinators that want to decide about its savepoint."""

    def __init__(self, store: FileSystemStore) -> None:
        self.store = store
        self.metadata = complete(store, JOB, SEVEN)
        self.target = f"{store.url}/sp"
        self.before: dict[str, Callable[[], object]] = {}
        """What happens just before an operation on a file of the savepoint."""

    def opened(self, url: str) -> FileSystemStore:
        """The store at a url, as it is."""
        return opened_like(self.store, url)

    def watched(self, url: str) -> _Watched:
        """The same, with what happens in between."""
        return _Watched(self.opened(url), self.before)

    def export(self, stops: Callable[[], bool] = lambda: False, contested: bool = False) -> str:
        """The coordinator that was replaced copies, until `stops` is true."""
        return write_savepoint(self.watched, self.store.url, self.target, self.metadata, ANY_PERMIT, stops, contested)

    def void(self) -> bool:
        """Its successor gives the savepoint up."""
        return void_savepoint(self.watched, self.target, JOB, "demo", 5, any_permit(7))

    def found(self) -> CheckpointMetadata:
        """What lies in the place of `_metadata`. All other files of the savepoint are gone."""
        folder = self.opened(f"{self.target}/{FOLDER}")
        assert folder.list("") == [METADATA_NAME]
        return read_metadata(folder, JOB, SEVEN, savepoint=True)


class _Watched(WrappedStore):
    """Lets something happen just before an operation, once."""

    def __init__(self, store: FileSystemStore, before: dict[str, Callable[[], object]]) -> None:
        super().__init__(store)
        self._before = before

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        self._before.pop(f"write {path}", lambda: None)()
        return super().write(path, chunks)

    def create(self, path: str, data: Buffer) -> None:
        self._before.pop(f"create {path}", lambda: None)()
        super().create(path, data)


@pytest.fixture
def world(store: FileSystemStore) -> World:
    """On each kind of store."""
    return World(store)


@pytest.fixture
def local(local_store: FileSystemStore) -> World:
    """In a local folder, for what has nothing to do with the kind of store."""
    return World(local_store)


def test_who_comes_after_the_tombstone_is_refused_and_leaves_nothing(world: World) -> None:
    """The copy cannot become whole any more, however late it comes, and the successor knows that it never was."""
    assert not world.void()
    with pytest.raises(FencedError, match="has aborted this savepoint"):
        world.export()
    assert world.found().void
    assert not world.void(), "who repeats it hears the same"
    assert world.found().void


@pytest.mark.parametrize("moment", ["write counts-1", "create _metadata"])
def test_a_copy_that_is_overtaken_clears_up_after_itself(world: World, moment: str) -> None:
    """The successor deletes what it finds; the rest of the copy goes when its last step is refused."""
    world.before[moment] = lambda: world.before.clear() or world.void()
    with pytest.raises(FencedError, match="has aborted this savepoint"):
        world.export()
    assert world.found().void


@pytest.mark.parametrize("moment", ["write counts-0", "write counts-1"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_that_is_to_stop_leaves_nothing(world: World, moment: str, fails: bool) -> None:
    """Its job is over, and nobody else deletes what it has written; nor does it become whole."""
    stops: list[bool] = []

    def begins() -> None:
        stops.append(True)
        if fails:
            raise StorageError("away")

    world.before[moment] = begins
    with pytest.raises(StorageError if fails else SavepointStoppedError):
        world.export(lambda: bool(stops))
    assert world.opened(f"{world.target}/{FOLDER}").list("") == []


@pytest.mark.parametrize("lost", [False, True])
def test_a_copy_that_is_to_stop_leaves_nothing_where_it_has_become_whole(world: World, lost: bool) -> None:
    """It was to stop while storage was creating `_metadata`, whether the answer of that was lost or not."""
    stops: list[bool] = []

    def creates() -> None:
        stops.append(True)
        if lost:
            world.export()
            raise StorageError("lost")

    world.before[f"create {METADATA_NAME}"] = creates
    with pytest.raises(StorageError if lost else SavepointStoppedError):
        world.export(lambda: bool(stops))
    assert world.opened(f"{world.target}/{FOLDER}").list("") == []


def test_a_copy_that_is_to_stop_leaves_nothing_where_it_was_whole_before(local: World) -> None:
    """The answer of an earlier copy was lost, and the job has ended since."""
    local.export()
    with pytest.raises(SavepointStoppedError):
        local.export(lambda: True)
    assert local.opened(f"{local.target}/{FOLDER}").list("") == []


def test_a_copy_beside_that_of_a_lost_coordinator_leaves_a_tombstone_where_it_is_whole(world: World) -> None:
    """The lost one may have completed it: it never becomes whole again, and who gives it up learns that it was."""
    world.export()
    with pytest.raises(SavepointStoppedError):
        world.export(lambda: True, contested=True)
    assert world.found().void
    with pytest.raises(FencedError, match="has aborted this savepoint"):
        world.export()
    assert world.void()


def test_a_copy_that_is_to_stop_leaves_the_tombstone(world: World) -> None:
    """A coordinator that has taken over has made it, and others may still be copying."""
    stops: list[bool] = []
    world.before["write counts-1"] = lambda: stops.append(world.void())
    with pytest.raises(SavepointStoppedError):
        world.export(lambda: bool(stops))
    assert world.found().void


def test_a_copy_that_was_first_is_told_of_and_voided(world: World) -> None:
    """Nobody was given its path, and its checkpoint is none. What was there is not missing for a moment."""
    path = world.export()
    assert verify(path, open_store=world.opened).ok
    assert world.void()
    assert world.found().void
    assert world.void(), "who repeats it hears the same"
    with pytest.raises(FencedError):
        world.export()
    assert world.found().void


def test_a_copy_that_is_quicker_than_the_tombstone_is_found(world: World) -> None:
    """It becomes whole just when the successor wants to create the tombstone."""
    world.before[f"create {METADATA_NAME}"] = lambda: world.before.clear() or world.export()
    assert world.void()
    assert world.found().void


def test_one_that_is_half_deleted_is_voided_as_well(local: World) -> None:
    """A user began to delete it and did not get to the end. That holds nobody up, and the copy stays away."""
    local.export()
    folder = local.opened(f"{local.target}/{FOLDER}")
    whole = read_metadata(folder, JOB, SEVEN, savepoint=True)
    folder.write(METADATA_NAME, [encode_metadata(replace(whole, deleted=True))])
    assert local.void()
    found = local.found()
    assert (found.void, found.deleted) == (True, False)
    with pytest.raises(FencedError):
        local.export()


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("applied", [False, True])
def test_a_step_that_fails_can_be_repeated_and_says_the_same(local: World, exported: bool, applied: bool) -> None:
    """Whether the tombstone was written when its answer was lost, or not."""
    if exported:
        local.export()
    step = f"write {METADATA_NAME}" if exported else f"create {METADATA_NAME}"

    def fails() -> None:
        if applied:
            local.void()
        raise StorageError("lost")

    local.before[step] = fails
    with pytest.raises(StorageError, match="lost"):
        local.void()
    assert local.void() is exported
    assert local.found().void


def test_a_tombstone_is_no_savepoint_and_can_be_deleted(local: World) -> None:
    """It is not listed, not whole, not restored; who wants the folder gone deletes it."""
    local.void()
    path = f"{local.target}/{FOLDER}"
    assert list_checkpoints(local.target) == []
    assert verify(path).problems == ("checkpoint 7 was given up and never completed",)
    with pytest.raises(ConfigurationError, match="was given up"):
        check_not_given_up(local.found(), "restore='it'", open_store)
    assert delete(path) == 1
    assert open_store(local.target).list(FOLDER) == []
