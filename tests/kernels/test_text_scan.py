"""Records and values of CSV are those of a plain reader, wherever blocks end; frames of JSON are those of a parser."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.state.kernels.text_scan import (
    BLANK,
    CONTROL_CHARACTER,
    NO_OBJECT,
    NOTHING,
    OK,
    TEXT_AFTER_QUOTE,
    TEXT_BEHIND,
    UNCLOSED_QUOTE,
    UNFINISHED,
    CsvDialect,
    braced_lines,
    csv_column,
    frame_json,
    scan_csv,
    skip_csv,
)

RFC = CsvDialect(ord(","), ord('"'), NOTHING, NOTHING, True)
SPARK = CsvDialect(ord(","), ord('"'), ord("\\"), NOTHING, True)
TRIMMED = replace(SPARK, ignore_leading=True, ignore_trailing=True)
_VALUES = st.text(alphabet='ab ,"\n\r\\é', max_size=8)


def found(data: bytes, dialect: CsvDialect, block: int) -> list[list[bytes | None]]:
    """The values of all records, in blocks of so many bytes."""
    rows: list[list[bytes | None]] = []
    rest, left = b"", data
    while True:
        more, left = left[:block], left[block:]
        rest, final = rest + more, not more
        array = np.frombuffer(rest, dtype=np.uint8)
        records = scan_csv(array, 0, final, dialect)
        assert not records.status.any()
        offsets, out, valid = csv_column(
            array, records, np.arange(len(records.field_starts)), dialect.escape, dialect.quote, b"", b""
        )
        values = [out[offsets[i] : offsets[i + 1]].tobytes() if valid[i] else None for i in range(len(valid))]
        bounds = records.first_fields.tolist()
        rows += [values[start:end] for start, end in pairwise(bounds)]
        rest = rest[records.consumed :]
        if final:
            assert rest == b""
            return rows


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(_VALUES, min_size=2, max_size=3), max_size=6),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.integers(1, 40),
)
def test_values_are_those_of_a_plain_writer(rows: list[list[str]], end: str, all_quoted: bool, block: int) -> None:
    """Python's own writer quotes what must be quoted; with and without a line break at the end."""
    all_quoted = all_quoted or end != "\r\n"  # Python quotes no line breaks that end no line of its own
    target = io.StringIO()
    csv.writer(target, lineterminator=end, quoting=csv.QUOTE_ALL if all_quoted else csv.QUOTE_MINIMAL).writerows(rows)
    data = target.getvalue().encode()
    expected = [[value.encode() or (b"" if all_quoted else None) for value in row] for row in rows]
    assert found(data, RFC, block) == expected
    assert found(data.removesuffix(end.encode()), RFC, block) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(_VALUES, min_size=2, max_size=3), max_size=6), st.integers(1, 40))
def test_quotes_behind_the_escape_character(rows: list[list[str]], block: int) -> None:
    """As Spark writes them: a backslash before quotes and backslashes in quoted values."""
    lines = []
    for row in rows:
        escaped = [value.replace("\\", "\\\\").replace('"', '\\"') for value in row]
        lines.append(",".join(f'"{value}"' for value in escaped) + "\n")
    expected = [[value.encode() for value in row] for row in rows]
    assert found("".join(lines).encode(), SPARK, block) == expected


@pytest.mark.parametrize("block", [1, 3, 100])
def test_blanks_around_values_that_are_ignored(block: int) -> None:
    """They stand outside of quotes. A value that has nothing else is null."""
    data = b'  a , "b" ,\t" c ",  \n b,,"",""\t\n'
    assert found(data, TRIMMED, block) == [[b"a", b"b", b" c ", None], [b"b", None, b"", b""]]


@pytest.mark.parametrize(
    ("data", "statuses", "begins"),
    [
        (b'a,"x"y,1\nb,2\n', [TEXT_AFTER_QUOTE, OK], [0, 9]),
        (b'"x" ,1\n"x"\t,2\n', [OK, OK], [0, 7]),
        (b'a,1\n"b,2\nc,3\n', [OK, UNCLOSED_QUOTE], [0, 4]),
        (b"\n  \r\n\ra\n", [OK], [6]),
    ],
)
def test_what_is_wrong_with_records(data: bytes, statuses: list[int], begins: list[int]) -> None:
    """Text behind a quoted value, and a quote that nothing closes; blank lines are no records."""
    records = scan_csv(np.frombuffer(data, dtype=np.uint8), 0, True, SPARK)
    assert (records.status.tolist(), records.starts.tolist()) == (statuses, begins)


def test_comments_and_values_of_one_line() -> None:
    """Lines that begin with the character are passed over; without multi_line a quoted value ends with its line."""
    dialect = CsvDialect(ord(";"), ord('"'), NOTHING, ord("#"), False)
    data = b'#a;b\n1;2\n#\n"x\ny;3\n#'
    records = scan_csv(np.frombuffer(data, dtype=np.uint8), 0, True, dialect)
    assert records.starts.tolist() == [5, 11, 14]
    assert records.status.tolist() == [OK, UNCLOSED_QUOTE, OK]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='ab,"\n\r\\ ', min_size=1, max_size=30), st.integers(1, 5), st.sampled_from([SPARK, TRIMMED]))
def test_a_record_that_is_skipped_ends_where_a_record_ends(text: str, block: int, dialect: CsvDialect) -> None:
    """Byte by byte or in blocks: the state is all that is needed."""
    data = text.encode()
    records = scan_csv(np.frombuffer(data, dtype=np.uint8), 0, True, dialect)
    if not len(records) or records.starts[0] or records.status[0] == TEXT_AFTER_QUOTE:
        return
    state, at, rest = np.zeros(1, dtype=np.int64), 0, data
    while rest:
        part, rest = rest[:block], rest[block:]
        end = skip_csv(np.frombuffer(part, dtype=np.uint8), 0, dialect, state)
        if end >= 0:
            at += end
            break
        at += len(part)
    ending = data[int(records.ends[0]) :]
    breaks = 2 if ending.startswith(b"\r\n") else min(1, len(ending))
    assert at == int(records.ends[0]) + breaks


@pytest.mark.parametrize(
    ("record", "status"),
    [
        (b'{"a":1}', OK),
        (b' \t{"a":{"b":[1,{}]},"c":"}{\\"\\\\"} \r', OK),
        (b'{"a":\n1}', OK),
        (b"", BLANK),
        (b"  ", BLANK),
        (b"null", NO_OBJECT),
        (b"[{}]", NO_OBJECT),
        (b'{"a":1', UNFINISHED),
        (b'{"a":"x}', UNFINISHED),
        (b'{"a":1}{"a":2}', TEXT_BEHIND),
        (b'{"a":1} x', TEXT_BEHIND),
        (b'{"a":"x\ny"}', CONTROL_CHARACTER),
        (b'{"a":"\\\n"}', CONTROL_CHARACTER),
    ],
)
def test_the_frame_of_an_object(record: bytes, status: int) -> None:
    """One object, alone, with strings as JSON has them; records beside it make no difference."""
    data = b'{"x":"' + record + b'"}' + record + b"{"
    start = len(record) + 8
    starts, ends = np.array([start], dtype=np.int64), np.array([start + len(record)], dtype=np.int64)
    found = frame_json(np.frombuffer(data, dtype=np.uint8), starts, ends)
    assert found.tolist() == [status]


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.lists(st.none() | st.booleans()), max_size=4))
def test_every_object_that_is_written_has_a_frame(value: dict[str, object]) -> None:
    """With and without characters beyond ASCII, in one line or in several."""
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=2)):
        data = text.encode("utf-8", "surrogatepass")
        status = frame_json(
            np.frombuffer(data, dtype=np.uint8), np.zeros(1, dtype=np.int64), np.array([len(data)], dtype=np.int64)
        )
        assert status.tolist() == [OK]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"{}", 1),
        (b'{"a":1}\n{"a":2}\n{"a":"a longer text, of more than a word"}', 3),
        (b"", 0),
        (b"{", 0),
        (b"}", 0),
        (b" {}", 0),
        (b"{} ", 0),
        (b"{}\n", 0),
        (b"{}\r\n{}", 0),
        (b"{}\n\n{}", 0),
        (b"{}\n {}", 0),
        (b"{},\n{}", 0),
        (b'{"a":\t1}', 0),
        (b'{"a":1\0}', 0),
    ],
)
def test_lines_between_braces(data: bytes, lines: int) -> None:
    """Counted if nothing else is a control character, wherever in a word it would be."""
    for shift in range(9):
        block = b"{" + b"x" * shift + b"}\n" + data if data else data
        expected = lines + 1 if lines else 0
        assert braced_lines(np.frombuffer(block, dtype=np.uint8)) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="{}\n\x1f \x7f\u00ff", max_size=40))
def test_lines_between_braces_are_those_of_a_plain_loop(text: str) -> None:
    """With bytes below a blank next to others, and beyond ASCII."""
    data = text.encode("latin-1")
    lines = data.split(b"\n")
    plain = all(line[:1] == b"{" and line[-1:] == b"}" and len(line) > 1 and min(line) >= 32 for line in lines)
    assert braced_lines(np.frombuffer(data, dtype=np.uint8)) == (len(lines) if plain else 0)
