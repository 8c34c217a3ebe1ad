"""Paths are spelled in one place, and every name in them can be read back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.storage.checkpoints.layout import (
    CheckpointLayout,
    CheckpointPointer,
    escape,
    parse_changelog_file_name,
    parse_channels_file_name,
    parse_checkpoint_name,
    parse_pointer,
    parse_savepoint_name,
    parse_state_file_name,
    savepoint_name,
    unescape,
)
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import TEMPORARY_PREFIX
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex, VertexId

_LAYOUT = CheckpointLayout(JobId("demo-1a2b3c4d"))
_any_text = st.text(st.characters()) | st.sampled_from(["", ".", "..", "a/b", ".tmp-x", "a-1", "ü", "\ud800", "%2E"])


def test_spells_the_documented_paths() -> None:
    """The layout of the architecture page."""
    seven = CheckpointId(7)
    found = (
        _LAYOUT.checkpoint_dir(seven),
        _LAYOUT.metadata(seven),
        _LAYOUT.state_file(seven, VertexId("count"), SubtaskIndex(3)),
        _LAYOUT.channels_file(seven, VertexId("count"), SubtaskIndex(3)),
        _LAYOUT.shared_dir(),
        _LAYOUT.layer_file(seven, VertexId("count"), SubtaskIndex(3)),
        _LAYOUT.native_dir(seven, VertexId("count"), SubtaskIndex(3), OperatorUid("my/uid")),
        _LAYOUT.taskowned_dir(),
        _LAYOUT.events_dir(),
    )

    job = "demo-1a2b3c4d"
    own = ("chk-7", "chk-7/_metadata", "chk-7/count-3", "chk-7/count-3-channels")
    shared = ("shared", "shared/chk-7/count-3", "shared/chk-7/count-3=my%2Fuid")
    assert found == tuple(f"{job}/{path}" for path in (*own, *shared, "taskowned", "events"))


@given(vertex=_any_text, subtask=st.integers(0, 99), attempt=st.integers(0, 10**7), whole=st.booleans())
@settings(max_examples=80)
@example(vertex="a.b-1.000001-00000002.base", subtask=0, attempt=3, whole=False)
def test_files_of_changelogs_tell_their_attempt(vertex: str, subtask: int, attempt: int, whole: bool) -> None:
    """Whatever the vertex is called; nothing else in a job's folder passes for one."""
    written = VertexId(vertex), SubtaskIndex(subtask), AttemptNumber(attempt)
    path = _LAYOUT.changelog_file(*written, 12, whole)

    assert parse_changelog_file_name(path.removeprefix(f"{_LAYOUT.changelog_dir()}/")) == written
    state_file = _LAYOUT.state_file(CheckpointId(7), VertexId(vertex), SubtaskIndex(subtask))
    others = (state_file.rpartition("/")[2], "count-0.1-2.segments", "count-0.1.base", "base", "1-2.base", "x.1-2.base")
    assert [parse_changelog_file_name(name) for name in others] == [None] * len(others)


@given(one=st.tuples(_any_text, st.integers(0, 99)), other=st.tuples(_any_text, st.integers(0, 99), _any_text))
@settings(max_examples=80)
@example(one=("a-0.b", 1), other=("a", 0, "b-1"))
@example(one=("a-0=b", 1), other=("a", 0, "b-1"))
def test_folders_of_backends_are_no_layer_files(one: tuple[str, int], other: tuple[str, int, str]) -> None:
    """Whatever vertices and operators are called: a file and a folder of one name cannot both be there."""
    seven = CheckpointId(7)
    vertex, subtask, uid = VertexId(other[0]), SubtaskIndex(other[1]), OperatorUid(other[2])

    layer = _LAYOUT.layer_file(seven, VertexId(one[0]), SubtaskIndex(one[1]))
    folder = _LAYOUT.native_dir(seven, vertex, subtask, uid)

    assert layer != folder
    assert folder.startswith(f"{_LAYOUT.shared_checkpoint_dir(seven)}/")
    assert "/" not in folder.removeprefix(f"{_LAYOUT.shared_checkpoint_dir(seven)}/")


@given(text=_any_text)
@settings(max_examples=80)
def test_escaped_text_is_one_plain_name(text: str) -> None:
    """Any text becomes one part of a path, never special or temporary, and comes back."""
    name = escape(text)

    assert unescape(name) == text
    assert name.isascii()
    assert "/" not in name
    assert not name.startswith((".", TEMPORARY_PREFIX))


@given(vertex=_any_text, subtask=st.integers(0, 10**6))
@settings(max_examples=50)
def test_state_files_tell_whose_they_are(vertex: str, subtask: int) -> None:
    """Vertex and subtask can be read back from the name, so no two subtasks share a file."""
    path = _LAYOUT.state_file(CheckpointId(1), VertexId(vertex), SubtaskIndex(subtask))

    name = path.rsplit("/", 1)[1]
    assert parse_state_file_name(name) == (vertex, subtask)
    assert parse_channels_file_name(name) is None


@given(vertex=_any_text | st.just("v-1-channels"), subtask=st.integers(0, 10**6))
@settings(max_examples=50)
def test_files_of_channels_are_no_state_files(vertex: str, subtask: int) -> None:
    """They tell whose they are too, and neither kind is taken for the other."""
    name = _LAYOUT.channels_file(CheckpointId(1), VertexId(vertex), SubtaskIndex(subtask)).rsplit("/", 1)[1]

    assert parse_channels_file_name(name) == (vertex, subtask)
    assert parse_state_file_name(name) is None


@pytest.mark.parametrize("name", ["_metadata", "chk", "v-", "v-x", "v-²"])
def test_other_names_are_no_state_files(name: str) -> None:
    """What was not written as a state file is not taken for one."""
    assert parse_state_file_name(name) is None


@pytest.mark.parametrize("name", ["chk-", "chk-x", "chk-0", "chk-01", "chk--1", "chk-²", "17", "savepoint-1", ""])
def test_other_names_are_no_checkpoints(name: str) -> None:
    """Only `chk-` and a number from 1 on, spelled in the one way, is a checkpoint's folder."""
    assert parse_checkpoint_name(name) is None


@pytest.mark.parametrize("root", ["/ck", "/", "s3://bucket", "gs://bucket/a/b", "memory://", "memory://x", "rel/ck"])
@pytest.mark.parametrize("suffix", ["", "/", "/_metadata", "/_metadata/"])
def test_pointers_come_back(root: str, suffix: str) -> None:
    """A pointer gives root, job and number, however its end is spelled."""
    expected = CheckpointPointer(root, JobId("demo-1"), CheckpointId(17))

    assert parse_pointer(str(expected) + suffix) == expected


@pytest.mark.parametrize("root", ["/sp/", "/", "s3://bucket/", "s3://bucket/a/b/", "memory://x/", "rel/", ""])
@pytest.mark.parametrize("suffix", ["", "/", "/_metadata", "/_metadata/"])
def test_pointers_to_savepoints_come_back(root: str, suffix: str) -> None:
    """A savepoint's own folder is the root of its files, wherever it lies."""
    expected = CheckpointPointer(f"{root}savepoint-demo-1-17", JobId("demo-1"), CheckpointId(17), savepoint=True)

    assert parse_pointer(str(expected) + suffix) == expected
    assert expected.metadata == "_metadata"


@given(job=st.text(st.characters(exclude_characters="/"), min_size=1).filter(lambda j: j not in (".", "..")))
@settings(max_examples=50)
def test_names_of_savepoints_come_back(job: str) -> None:
    """Job and number can be read from the name, dashes and digits in the job's id notwithstanding."""
    assert parse_savepoint_name(savepoint_name(JobId(job), CheckpointId(12))) == (job, 12)


@pytest.mark.parametrize("name", ["savepoint-1", "savepoint--1", "savepoint-a-0", "savepoint-a-x", "chk-1", "a-1", ""])
def test_other_names_are_no_savepoints(name: str) -> None:
    """A savepoint's folder names a job and a number from 1 on."""
    assert parse_savepoint_name(name) is None


def test_a_pointer_in_the_working_directory() -> None:
    """A relative path without a root is one in the working directory."""
    assert parse_pointer("demo-1/chk-3") == CheckpointPointer(".", JobId("demo-1"), CheckpointId(3))


@pytest.mark.parametrize(
    "path", ["", "/", "chk-1", "/chk-1", "/a/b", "s3://b/chk-1", "s3://chk-1", "gs://b/chk-1", "/a/../chk-1"]
)
def test_other_paths_are_refused(path: str) -> None:
    """What is no pointer is told how one looks."""
    with pytest.raises(ConfigurationError, match="<root>/<job>/chk-<number>"):
        parse_pointer(path)


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b"])
def test_refuses_job_ids_that_are_no_folder(job_id: str) -> None:
    """An id that would leave the root, or be no name, is refused."""
    with pytest.raises(ConfigurationError, match="cannot be a job id"):
        CheckpointLayout(JobId(job_id))
