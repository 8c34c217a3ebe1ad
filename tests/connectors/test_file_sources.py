"""Files as a source: formats, patterns, which files count, and each once however it is read."""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from source_contract import check_source

from tidegate.connectors.bad_rows import BadRows
from tidegate.connectors.files.open_file import UnreadableFileError
from tidegate.connectors.files.patterns import FilePattern
from tidegate.connectors.files.source import FileForm, FolderSource, source_of_files
from tidegate.connectors.source import ReadResult, Source, SourceReader, SourceSplit
from tidegate.storage.codec import decode
from tidegate.storage.errors import ConfigurationError, StorageError
from tidegate.storage.files.file_system_store import open_store

SCHEMA = pa.schema([("x", pa.int64()), ("s", pa.string())])
DAY_MS = 86_400_000


def rows(*xs: int) -> pa.Table:
    """A table of these numbers."""
    return pa.table({"x": xs, "s": [f"s{x}" for x in xs]}, SCHEMA)


def write(path: Path, *xs: int, at_ms: int | None = None) -> None:
    """A file in the format that its name tells, last changed at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".parquet" in path.name:
        pq.write_table(rows(*xs), path, row_group_size=3)
    elif ".csv" in path.name:
        pa_csv.write_csv(rows(*xs), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(*xs).to_pylist()))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    if at_ms is not None:
        os.utime(path, ns=(at_ms * 10**6, at_ms * 10**6))


@dataclass
class Clock:
    """A clock that goes on by an interval whenever somebody looks."""

    now_ms: int = 20_000 * DAY_MS

    def __call__(self) -> int:
        """A little later than before."""
        self.now_ms += 10
        return self.now_ms


def folder(pattern: str, *, lanes: int = 1, age_ms: int = 7 * DAY_MS, bad_rows: BadRows = "fail") -> FolderSource:
    """A folder that is looked at again whenever a split has nothing."""
    form = FileForm(SCHEMA, bad_rows=bad_rows)
    return FolderSource(FilePattern.of(pattern), form, SCHEMA, 10, age_ms, lanes, Clock())


def bounded(pattern: str | list[str], **more: object) -> Source:
    """The files that are there now."""
    return source_of_files(pattern, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".json", ".csv.gz", ".jsonl.gz"])
def test_files_keep_the_contract(tmp_path: Path, suffix: str) -> None:
    """In every format: each row once, in the order of the file, from any row on."""
    write(tmp_path / f"a{suffix}", *range(10))
    write(tmp_path / f"b{suffix}", *range(10, 14))
    found = check_source(bounded(f"{tmp_path}/*{suffix}"))
    assert found == rows(*range(14)).to_pylist()


@pytest.mark.slow
def test_a_folder_keeps_the_contract(tmp_path: Path) -> None:
    """Over several splits, and with a file that has no rows."""
    for number in range(9):
        write(tmp_path / f"{number}.parquet", *range(number * 10, number * 10 + number), at_ms=number)
    found = check_source(folder(f"{tmp_path}/*.parquet", lanes=4))
    assert sorted(row["x"] for row in found) == [n * 10 + i for n in range(9) for i in range(n)]  # type: ignore[type-var]


def test_a_store_in_memory_is_a_folder_too() -> None:
    """Whatever the storage of the project opens."""
    url = f"memory://files-{uuid.uuid4().hex}"
    sink = pa.BufferOutputStream()
    pq.write_table(rows(1, 2), sink)
    open_store(url).write("in/a.parquet", [sink.getvalue().to_pybytes()])
    assert check_source(bounded(f"{url}/in/*.parquet")) == rows(1, 2).to_pylist()
    assert check_source(folder(f"{url}/in/")) == rows(1, 2).to_pylist()


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.csv", ["a.csv", "b+1.csv"]),
        ("?.csv", ["a.csv"]),
        ("[ab]*", ["a.csv", "b+1.csv"]),
        ("[!ab]*", ["c.txt"]),
        ("[^ab]*", ["c.txt"]),
        ("[b-z]*", ["b+1.csv", "c.txt"]),
        ("d=1[!x]e.csv", []),
        ("", ["a.csv", "b+1.csv", "c.txt"]),
        ("b+1.csv", ["b+1.csv"]),
        ("**/*.csv", ["a.csv", "b+1.csv", "d=1/e.csv", "d=1/f/g.csv"]),
        ("*/*.csv", ["d=1/e.csv"]),
        ("d=1/**", ["e.csv", "f/g.csv"]),
    ],
)
def test_file_patterns_match_like_a_shell(tmp_path: Path, pattern: str, names: list[str]) -> None:
    """Hidden files never count, nor what is below a hidden folder."""
    everything = [
        "a.csv",
        "b+1.csv",
        "c.txt",
        "d=1/e.csv",
        "d=1/f/g.csv",
        "_a.csv",
        ".a.csv",
        "_tmp/a.csv",
        "d=1/.x/a.csv",
    ]
    for name in everything:
        write(tmp_path / name, 1)
    assert [file.path for file in FilePattern.of(f"{tmp_path}/{pattern}").files()] == names


@pytest.mark.parametrize("name", ["a[1].csv", "a?.csv", "a*.csv", "a[!1].csv", "a[.csv", "[a]/b.csv"])
def test_names_with_the_characters_of_patterns(tmp_path: Path, name: str) -> None:
    """They are read as `glob.escape` writes them. Brackets of a name that were to be a choice are refused."""
    for each in (name, "a1.csv", "a/b.csv"):
        write(tmp_path / each, 1)
    assert [file.path for file in FilePattern.of(f"{tmp_path}/{glob.escape(name)}").files()] == [name]
    both = [f"{tmp_path}/{glob.escape(name)}", f"{tmp_path}/a/b.csv"]
    assert [file.path for file in FilePattern.of(both).files()] == sorted([name, "a/b.csv"])
    if "[" in name and "]" in name:
        for pattern in (f"{tmp_path}/{name}", [f"{tmp_path}/{name}", f"{tmp_path}/a1.csv"]):
            with pytest.raises(ConfigurationError, match=re.escape(f"the name of {name!r}")):
                FilePattern.of(pattern).files()


def test_brackets_that_are_no_choice_are_refused(tmp_path: Path) -> None:
    """Instead of an error of the regular expression."""
    with pytest.raises(ConfigurationError, match="the brackets are not a set of characters"):
        FilePattern.of(f"{tmp_path}/[z-a].csv")


class Reading:
    """One split of a folder, read as a task does; a restore begins with a new reader."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reader: SourceReader = source.reader()
        self.split: SourceSplit = source.splits()[0]
        self.offset = 0

    def more(self, rows_max: int = 1_000) -> list[object]:
        """All that there is by now."""
        found = []
        while result := self.once(rows_max):
            found += result
            assert len(found) < 1_000, "files are read again and again"
        return found

    def once(self, rows_max: int) -> list[object]:
        """What the next reads give, until one gives something."""
        for _ in range(5):
            result: ReadResult = self.reader.read(self.split, self.offset, rows_max)
            if result.payload is not None:
                self.split = replace(self.split, payload=result.payload)
            self.offset = result.next_offset
            if result.batch is not None:
                return [row["x"] for row in result.batch.to_pylist()]
        return []

    def restore(self) -> None:
        """Go on elsewhere."""
        self.reader = self.source.reader()


def test_new_files_come_once_in_the_order_of_their_time(tmp_path: Path) -> None:
    """Also those that are older than what was read, and whatever is restarted in between."""
    reading = Reading(folder(f"{tmp_path}/"))
    assert reading.more() == []
    write(tmp_path / "b.parquet", 1, 2, 3, 4, at_ms=DAY_MS)
    write(tmp_path / "c.parquet", 5, at_ms=DAY_MS)
    write(tmp_path / "a.parquet", 6, at_ms=DAY_MS + 1)
    assert reading.once(2) == [1, 2]
    reading.restore()
    write(tmp_path / "late.parquet", 7, at_ms=DAY_MS - 5)
    assert reading.more() == [3, 4, 7, 5, 6]
    reading.restore()
    write(tmp_path / "a.parquet", 99, at_ms=DAY_MS * 2)
    assert reading.more() == [], "a file that was read is not read again when it changes"


def test_what_is_remembered_does_not_grow_for_ever(tmp_path: Path) -> None:
    """Files older than max_file_age behind the newest are forgotten, an eighth of it later at most, and left out when
    they come."""
    reading = Reading(folder(f"{tmp_path}/", age_ms=10))
    for number in range(40):
        write(tmp_path / f"{number}.parquet", number, at_ms=1_000 + number)
    assert reading.more() == list(range(40))
    assert len(decode(reading.split.payload).read) == 24 * (11 + 1)
    reading.restore()
    write(tmp_path / "next.parquet", 40, at_ms=1_040)
    assert reading.more() == [40]
    assert len(decode(reading.split.payload).read) == 24 * 11
    write(tmp_path / "old.parquet", 99, at_ms=1_029)
    write(tmp_path / "late.parquet", 100, at_ms=1_030)
    assert reading.more() == [100]


def test_files_of_any_time_are_read(tmp_path: Path) -> None:
    """Before 1970 in their order, and one that is dated ahead does not hide those that come later."""
    reading = Reading(folder(f"{tmp_path}/", age_ms=DAY_MS))
    write(tmp_path / "b.parquet", 2, at_ms=-DAY_MS)
    write(tmp_path / "a.parquet", 1, at_ms=-900 * DAY_MS)
    write(tmp_path / "ahead.parquet", 3, at_ms=80_000 * DAY_MS)
    assert reading.more() == [1, 2, 3]
    reading.restore()
    for number in (4, 5):
        write(tmp_path / f"{number}.parquet", number, at_ms=20_000 * DAY_MS - number)
        assert reading.more() == [number]
    reading.restore()
    assert reading.more() == []


def test_a_file_that_comes_too_old_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, with its name; files that were read and forgotten since are not reported."""
    reading = Reading(folder(f"{tmp_path}/", age_ms=10))
    for number in range(40):
        write(tmp_path / f"{number}.parquet", number, at_ms=1_000 + number)
    assert reading.more() == list(range(40))
    assert reading.more() == []
    assert caplog.messages == []
    write(tmp_path / "old.parquet", 99, at_ms=500)
    assert reading.more() == []
    assert reading.more() == []
    (message,) = caplog.messages
    assert "old.parquet" in message
    assert "max_file_age" in message


def test_folders_that_are_links_are_read(tmp_path: Path) -> None:
    """But not round and round; pipes are no files."""
    write(tmp_path / "elsewhere" / "deep" / "r.parquet", 1)
    write(tmp_path / "in" / "x.parquet", 2)
    (tmp_path / "in" / "d").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "f.parquet").symlink_to(tmp_path / "elsewhere" / "deep" / "r.parquet")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "gone.parquet").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "in" / "pipe.parquet")
    found = FilePattern.of(f"{tmp_path}/in/**/*.parquet").files()
    assert [file.path for file in found] == ["d/deep/r.parquet", "f.parquet", "x.parquet"]


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are not left out in silence."""
    write(tmp_path / "d" / "a.parquet", 1)
    listed = os.scandir

    def refuses(path: str) -> object:
        if str(path).endswith("d"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuses)
    with pytest.raises(StorageError, match="Permission denied"):
        FilePattern.of(f"{tmp_path}/**/*.parquet").files()


def test_names_that_are_not_utf8_are_refused_by_name(tmp_path: Path) -> None:
    """Files that the pattern does not mean do not matter."""
    write(tmp_path / "a.parquet", 1)
    for name in (b"b\xff.parquet", b"c\xff.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"b'b\\xff\.parquet' in .* is not UTF-8"):
        bounded(f"{tmp_path}/*.parquet")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        Reading(folder(f"{tmp_path}/*.parquet")).more()


def test_a_folder_of_a_column_that_begins_with_an_underscore_is_not_hidden(tmp_path: Path) -> None:
    """Spark writes such folders, and reads them."""
    write(tmp_path / "_day=1" / "a.parquet", 1)
    write(tmp_path / "_tmp" / "a.parquet", 2)
    source = bounded(f"{tmp_path}/**/*.parquet", partitions=pa.schema([("_day", pa.int64())]))
    assert check_source(source) == [{"x": 1, "s": "s1", "_day": 1}]


def test_a_file_that_changes_while_it_is_read_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """At once after a restore, and at its end without one."""
    for restored in (True, False):
        reading = Reading(folder(f"{tmp_path}/"))
        write(tmp_path / "a.parquet", *range(6))
        assert reading.once(3) == [0, 1, 2]
        with (tmp_path / "a.parquet").open("ab") as file:
            file.write(b"more")
        if restored:
            reading.restore()
        with pytest.raises(UnreadableFileError, match=r"a\.parquet was changed after the job found it.*rename"):
            reading.more()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Damaged, with other columns, with values that do not fit, or gone: an error with the name, or a warning."""
    write(tmp_path / "1.parquet", 1, at_ms=1)
    (tmp_path / "2.parquet").write_bytes(b"PAR1 and no more")
    pq.write_table(pa.table({"y": [1]}), tmp_path / "3.parquet")
    pq.write_table(pa.table({"x": ["text"], "s": ["t"]}), tmp_path / "4.parquet")
    for number in (2, 3, 4):
        os.utime(tmp_path / f"{number}.parquet", (number, number))
    write(tmp_path / "5.parquet", 5, at_ms=10_000)
    for number in (2, 3, 4):
        reading = Reading(folder(f"{tmp_path}/[1{number}].parquet"))
        assert reading.once(10) == [1]
        with pytest.raises(UnreadableFileError, match=rf"{number}\.parquet cannot be read: .*bad_rows"):
            reading.more()
    assert Reading(folder(f"{tmp_path}/", bad_rows="skip")).more() == [1, 5]


def test_a_file_that_goes_before_it_is_read_is_left_out_and_later_it_is_an_error(tmp_path: Path) -> None:
    """Nobody waits for what is not there; half of a file is no input."""
    reading = Reading(folder(f"{tmp_path}/"))
    for number in (1, 2, 3):
        write(tmp_path / f"{number}.parquet", *range(number * 10, number * 10 + 4), at_ms=number)
    assert reading.once(4) == [10, 11, 12]
    (tmp_path / "2.parquet").unlink()
    assert [*reading.once(4), *reading.once(3)] == [13, 30, 31, 32]
    (tmp_path / "3.parquet").unlink()
    reading.restore()
    with pytest.raises(UnreadableFileError, match=r"3\.parquet was deleted before"):
        reading.more()


def test_only_wanted_columns_come_with_the_types_of_the_schema(tmp_path: Path) -> None:
    """In the order that was asked for; values are never cut to fit."""
    pq.write_table(pa.table({"s": ["a"], "z": [b"much"], "x": pa.array([7], pa.int32())}), tmp_path / "a.parquet")
    source = bounded(f"{tmp_path}/", schema=pa.schema([("x", pa.int64()), ("s", pa.string())]), columns=["x"])
    assert source.schema == pa.schema([("x", pa.int64())])
    assert check_source(source) == [{"x": 7}]


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_path_of_a_folder_means_the_files_in_it(tmp_path: Path, place: str) -> None:
    """Spark writes `orders.parquet` as a folder and reads it by that name. A file of that name is the file."""
    root = str(tmp_path) if place == "local" else f"memory://{uuid.uuid4()}"
    store = open_store(root)
    write(tmp_path / "made" / "x.parquet", 1)
    content = (tmp_path / "made" / "x.parquet").read_bytes()
    for path in ("orders.parquet/a.parquet", "orders.parquet/_SUCCESS", "orders.parquet/more/b.parquet", "c.parquet"):
        store.create(path, content)
    for pattern, count in (
        (f"{root}/orders.parquet", 1),
        (f"{root}/c.parquet", 1),
        ([f"{root}/orders.parquet", f"{root}/c.parquet"], 2),
    ):
        assert check_source(bounded(pattern)) == rows(1).to_pylist() * count


def test_a_path_of_a_folder_with_partitions_means_all_files_below(tmp_path: Path) -> None:
    """Without `partitions=` the error names the pattern."""
    write(tmp_path / "orders" / "day=1" / "a.parquet", 1)
    write(tmp_path / "orders" / "day=2" / "b.parquet", 2)
    source = bounded(f"{tmp_path}/orders", partitions=pa.schema([("day", pa.int64())]))
    assert sorted(row["day"] for row in check_source(source)) == [1, 2]
    with pytest.raises(ConfigurationError, match=r"give '.*/orders/\*\*/\*', and partitions="):
        bounded(f"{tmp_path}/orders")


def test_a_folder_that_grows_may_be_missing_when_it_is_named(tmp_path: Path) -> None:
    """Its path would otherwise be that of a single file, which never comes."""
    patterns: list[FilePattern] = []

    def follow(pattern: FilePattern, form: FileForm, schema: pa.Schema) -> Source:
        patterns.append(pattern)
        return FolderSource(pattern, form, schema, 10, DAY_MS, 1, Clock())

    write(tmp_path / "one.parquet", 1)
    for name in ("orders", "one.parquet"):
        bounded(f"{tmp_path}/{name}", schema=SCHEMA, kind="parquet", folder=follow)
    assert patterns == [FilePattern.of(f"{tmp_path}/orders/"), FilePattern.of(f"{tmp_path}/one.parquet")]


@pytest.mark.parametrize(
    ("pattern", "more", "named"),
    [
        ("*.parquet", {}, "no file matches;"),
        ("*.parquet", {"folder": lambda *_: None}, "no file matches; give schema="),
        ("*.dat", {"schema": SCHEMA, "folder": lambda *_: None}, "the format is not clear from the name"),
        ("*", {"kind": "orc"}, "format='orc' is not supported"),
        (
            "*.csv",
            {"schema": SCHEMA, "columns": ["z"], "folder": lambda *_: None},
            r"columns=\['z'\] has 'z', which is not a column; choose among",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_submission(
    tmp_path: Path, pattern: str, more: dict[str, object], named: str
) -> None:
    """With the pattern, and with what to do."""
    with pytest.raises(ConfigurationError, match=named):
        bounded(f"{tmp_path}/{pattern}", **more)


def test_a_folder_goes_on_in_the_splits_that_it_had(tmp_path: Path) -> None:
    """Their number says who reads which file."""
    before = folder(f"{tmp_path}/", lanes=3).splits()
    folder(f"{tmp_path}/", lanes=3).check_restored(before)
    with pytest.raises(ConfigurationError, match="give splits=3"):
        folder(f"{tmp_path}/", lanes=4).check_restored(before)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"a": 1}, {"a": 2}]\n', "an array"),
        ('[\n  {"a": 1},\n  {"a": 2}\n]\n', "an array"),
        ('{\n  "a": 1\n}\n', "an object in several lines"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_json_that_is_not_an_object_a_line_is_refused(tmp_path: Path, text: str, found: str, compressed: bool) -> None:
    """Its columns would be inferred from the lines that happen to be objects."""
    path = tmp_path / ("a.json.gz" if compressed else "a.json")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    with pytest.raises(ConfigurationError, match=rf"a file of JSON has one object a line, and .* begins with {found};"):
        source_of_files(str(path))


def test_a_folder_of_several_formats_is_refused(tmp_path: Path) -> None:
    """The format would be the one of the first file. The error names a file of each of two formats."""
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.json").write_text('{"x": 1}\n')
    with pytest.raises(ConfigurationError, match=r"'a.csv' is csv, and 'b.json' is json\. Give a pattern"):
        source_of_files(str(tmp_path))
    assert source_of_files(str(tmp_path / "*.json")).schema == pa.schema([("x", pa.int64())])
    (tmp_path / "b.json").unlink()
    assert source_of_files(str(tmp_path)).schema == pa.schema([("x", pa.int64())])
