"""Scans text files: where records and values begin and end in a block of bytes.

Rules:

- A kernel scans a block from the beginning of a record on. A record that may be incomplete at the end of the block is
  left for the next call, with more bytes. The result therefore does not depend on where blocks end.
- In CSV a line break outside of quotes ends a record: `\\n`, `\\r\\n` or `\\r`. Blank lines and comments are skipped.
- In a quoted value, a doubled quote is a quote, and so is a quote after the escape character. No other characters are
  special there. Outside of quotes only separators and line breaks are special.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.byte_strings import copy_bytes
from tidegate.state.kernels.jit import kernel, load64

NOTHING = -1
"""The value for a character that the dialect does not have: no quote, no escape, or no comment."""
OK, TEXT_AFTER_QUOTE, UNCLOSED_QUOTE = 0, 1, 2
"""Status of a CSV record."""
NO_OBJECT, UNFINISHED, TEXT_BEHIND, CONTROL_CHARACTER, BLANK = 1, 2, 3, 4, 5
"""Errors of a record that should be a JSON object."""
_QUOTED, _ESCAPED = 1, 2
_NEWLINE, _RETURN, _SPACE, _TAB = 10, 13, 32, 9
_SPACES, _HIGH_BITS = np.uint64(0x2020202020202020), np.uint64(0x8080808080808080)
_ONES, _FEEDS = np.uint64(0x0101010101010101), np.uint64(0x0A0A0A0A0A0A0A0A)
_RETURNS, _LOW_BITS = np.uint64(0x0D0D0D0D0D0D0D0D), np.uint64(0x7F7F7F7F7F7F7F7F)


@dataclass(frozen=True, slots=True)
class CsvDialect:
    """The special characters of a CSV file, each as a byte or NOTHING if the file has no such character.

    With `multi_line`, quoted values may contain line breaks. `ignore_leading` and `ignore_trailing` remove blanks and
    tabs around values that are not quoted.
    """

    separator: int
    quote: int
    escape: int
    comment: int
    multi_line: bool
    ignore_leading: bool = False
    ignore_trailing: bool = False


@dataclass(frozen=True, slots=True)
class CsvRecords:
    """The records in a block of a CSV file. Record i has the fields with the numbers from `first_fields[i]` to
    `first_fields[i + 1]`.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    status: NDArray[np.int64]
    first_fields: NDArray[np.int64]
    field_starts: NDArray[np.int64]
    field_ends: NDArray[np.int64]
    field_flags: NDArray[np.uint8]
    consumed: int
    """The beginning of the first record that was left for the next call."""

    def __len__(self) -> int:
        return len(self.starts)


def scan_csv(data: NDArray[np.uint8], start: int, final: bool, dialect: CsvDialect) -> CsvRecords:
    """Finds the records in a block of a CSV file from `start` on, where a record must begin.

    `final` is True if no bytes follow the block.
    """
    ends_of = np.zeros(2, dtype=np.int64)
    _count_ends(data, start, dialect.separator, ends_of)
    lines = int(ends_of[0]) + 1
    fields = int(ends_of[1]) + lines
    starts, ends, status = (np.empty(lines, dtype=np.int64) for _ in range(3))
    first_fields = np.zeros(lines + 1, dtype=np.int64)
    field_starts, field_ends = np.empty(fields, dtype=np.int64), np.empty(fields, dtype=np.int64)
    flags, counts = np.zeros(fields, dtype=np.uint8), np.zeros(2, dtype=np.int64)
    characters = dialect.separator, dialect.quote, dialect.escape, dialect.comment, dialect.multi_line
    blanks = dialect.ignore_leading, dialect.ignore_trailing
    _scan_csv(
        data,
        start,
        final,
        *characters,
        *blanks,
        starts,
        ends,
        status,
        first_fields,
        field_starts,
        field_ends,
        flags,
        counts,
    )
    count = int(counts[0])
    found = int(first_fields[count])
    return CsvRecords(
        starts[:count],
        ends[:count],
        status[:count],
        first_fields[: count + 1],
        field_starts[:found],
        field_ends[:found],
        flags[:found],
        int(counts[1]),
    )


def skip_csv(data: NDArray[np.uint8], start: int, dialect: CsvDialect, state: NDArray[np.int64]) -> int:
    """Skips one CSV record. Returns the position of the next record, or -1 if the record does not end in the block.

    `state` is an array of one number, which is 0 at the beginning of a record. After -1, pass the same array to the
    next call, with the bytes that follow.
    """
    characters = dialect.separator, dialect.quote, dialect.escape, dialect.multi_line, dialect.ignore_leading
    return int(_skip_csv(data, start, *characters, state))


def csv_column(
    data: NDArray[np.uint8],
    records: CsvRecords,
    fields: NDArray[np.int64],
    escape: int,
    quote: int,
    null: bytes,
    empty: bytes,
) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the values of these fields: offsets, bytes, and for each value a byte that is 0 for null.

    A value is null if it is empty and not quoted, or if it equals `null`. A value that is empty and quoted becomes
    `empty`, and null if `empty` equals `null`. Raises OverflowError for more than 2 GiB.
    """
    offsets, valid = np.empty(len(fields) + 1, dtype=np.int32), np.empty(len(fields), dtype=np.uint8)
    nulls, empties = np.frombuffer(null, dtype=np.uint8), np.frombuffer(empty, dtype=np.uint8)
    empty_is_null = bool(empty) and empty == null
    places = records.field_starts, records.field_ends, records.field_flags
    size = int(_csv_lengths(data, *places, fields, escape, quote, nulls, empties, empty_is_null, offsets, valid))
    if size > np.iinfo(np.int32).max:
        raise OverflowError(
            f"a column of one block of CSV has {size:,} bytes, more than 2 GiB; use a smaller max_row_size"
        )
    out = np.empty(size, dtype=np.uint8)
    _csv_bytes(data, *places, fields, escape, quote, empties, offsets, valid, out)
    return offsets, out, valid


def frame_json(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Returns for each record the error that keeps it from being one JSON object, or 0.

    Only braces, strings, and control characters within strings are checked.
    """
    status = np.zeros(len(starts), dtype=np.uint8)
    _frame_json(data, starts, ends, status)
    return status


def braced_lines(data: NDArray[np.uint8]) -> int:
    """Returns the number of lines if each begins with `{`, ends with `}` and has no control character, else 0.

    The text between the braces is not parsed.
    """
    return int(_braced_lines(data))


@kernel
def _zeros(word: np.uint64) -> np.int64:
    """Returns the number of bytes of a word that are 0."""
    high = (word & _LOW_BITS) + _LOW_BITS
    return np.int64(((~(high | word | _LOW_BITS)) >> np.uint64(7)) * _ONES >> np.uint64(56))


@kernel
def _count_ends(data: NDArray[np.uint8], start: int, separator: int, found: NDArray[np.int64]) -> None:
    """Counts the line breaks and the separators from `start` on."""
    size = data.shape[0]
    separators = np.uint64(separator) * _ONES
    breaks = np.int64(0)
    others = np.int64(0)
    at = start
    while at + 8 <= size:
        word = load64(data, at)
        breaks += _zeros(word ^ _FEEDS) + _zeros(word ^ _RETURNS)
        others += _zeros(word ^ separators)
        at += 8
    for place in range(at, size):
        breaks += data[place] == _NEWLINE or data[place] == _RETURN
        others += data[place] == separator
    found[0] = breaks
    found[1] = others


@kernel
def _scan_csv(
    data: NDArray[np.uint8],
    start: int,
    final: bool,
    separator: int,
    quote: int,
    escape: int,
    comment: int,
    multi_line: bool,
    ignore_leading: bool,
    ignore_trailing: bool,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    status: NDArray[np.int64],
    first_fields: NDArray[np.int64],
    field_starts: NDArray[np.int64],
    field_ends: NDArray[np.int64],
    flags: NDArray[np.uint8],
    counts: NDArray[np.int64],
) -> None:
    size = data.shape[0]
    separators = np.uint64(separator) * _ONES
    at = start
    record = 0
    field = 0
    complete = True
    while at < size and complete:
        begin = at
        c = data[at]
        # Blank lines, and comments.
        p = at
        if comment >= 0 and c == comment:
            while p < size and data[p] != 10 and data[p] != 13:
                p += 1
        elif separator != 32:
            while p < size and data[p] == 32:
                p += 1
        if p >= size:
            if p > at or (comment >= 0 and c == comment):
                if final:
                    at = size
                else:
                    complete = False
                continue
        elif data[p] == 10:
            at = p + 1
            continue
        elif data[p] == 13:
            if p + 1 >= size and not final:
                complete = False
                continue
            at = p + 1
            if at < size and data[at] == 10:
                at += 1
            continue
        # A record.
        first = field
        wrong = 0
        p = begin
        ended = False
        while not ended:
            flag = 0
            if ignore_leading:
                while p < size and data[p] != separator and (data[p] == 32 or data[p] == 9):
                    p += 1
            if p < size and quote >= 0 and data[p] == quote:
                q = p + 1
                flag = 1
                closed = False
                while q < size:
                    b = data[q]
                    if escape >= 0 and b == escape and escape != quote:
                        if q + 1 < size and (data[q + 1] == quote or data[q + 1] == escape):
                            flag = 3
                            q += 2
                            continue
                        if q + 1 >= size and not final:
                            complete = False
                            break
                    elif b == quote:
                        if q + 1 < size:
                            if data[q + 1] == quote:
                                flag = 3
                                q += 2
                                continue
                            closed = True
                            break
                        if final:
                            closed = True
                        else:
                            complete = False
                        break
                    elif (b == 10 or b == 13) and not multi_line:
                        break
                    q += 1
                if not complete:
                    break
                field_starts[field] = p + 1
                if closed:
                    field_ends[field] = q
                    q += 1
                    while q < size and data[q] != separator and (data[q] == 32 or data[q] == 9):
                        q += 1
                    if q < size and data[q] != separator and data[q] != 10 and data[q] != 13:
                        wrong = 1
                        while q < size and data[q] != 10 and data[q] != 13:
                            q += 1
                else:
                    if q > size:
                        q = size
                    if q >= size and not final:
                        complete = False
                        break
                    wrong = 2
                    field_ends[field] = q
            else:
                q = p
                while q + 8 <= size:
                    # A byte that is 0 in one of the three words is a separator or a line break.
                    word = load64(data, q)
                    of_separator = word ^ separators
                    of_feed = word ^ _FEEDS
                    of_return = word ^ _RETURNS
                    found = (of_separator - _ONES) & ~of_separator
                    found |= (of_feed - _ONES) & ~of_feed
                    found |= (of_return - _ONES) & ~of_return
                    if found & _HIGH_BITS != np.uint64(0):
                        break
                    q += 8
                while q < size and data[q] != separator and data[q] != 10 and data[q] != 13:
                    q += 1
                field_starts[field] = p
                field_ends[field] = q
                if ignore_trailing:
                    while field_ends[field] > p and data[field_ends[field] - 1] in (32, 9):
                        field_ends[field] -= 1
            flags[field] = flag
            field += 1
            if q >= size:
                if not final:
                    complete = False
                    break
                ended = True
                at = q
                p = q
            elif data[q] == separator and wrong == 0:
                p = q + 1
            else:
                ended = True
                p = q
                if data[q] == 13:
                    if q + 1 >= size and not final:
                        complete = False
                        break
                    q += 1
                    if q < size and data[q] == 10:
                        q += 1
                else:
                    q += 1
                at = q
        if not complete:
            field = first
            at = begin
            continue
        starts[record] = begin
        ends[record] = p
        status[record] = wrong
        record += 1
        first_fields[record] = field
    counts[0] = record
    counts[1] = at


@kernel
def _skip_csv(
    data: NDArray[np.uint8],
    start: int,
    separator: int,
    quote: int,
    escape: int,
    multi_line: bool,
    ignore_leading: bool,
    state: NDArray[np.int64],
) -> np.int64:
    """Scans CSV text for the end of a record, as a state machine.

    States: 0 at the start of a value, 1 in a plain value, 2 in a quoted value, 3 after an escape, 4 after a quote in a
    quoted value, 5 in the rest of a line, 6 after a `\\r` that ends the record, 7 in blanks after a quoted value.
    """
    now = state[0]
    for at in range(start, data.shape[0]):
        b = data[at]
        if now == 6:
            state[0] = 0
            return np.int64(at + 1) if b == 10 else np.int64(at)
        if now == 2 or now == 3:
            if now == 3 and b in (quote, escape):
                now = 2
            elif b == escape and escape >= 0 and escape != quote:
                now = 3
            elif b == quote:
                now = 4
            elif (b == 10 or b == 13) and not multi_line:
                now = 5
            else:
                now = 2
            if now != 5:
                continue
        elif now == 4 and b == quote:
            now = 2
            continue
        if b == 10:
            state[0] = 0
            return np.int64(at + 1)
        if b == 13:
            now = 6
        elif now == 5:
            continue
        elif b == separator:
            now = 0
        elif now == 4:
            now = 5 if b != 32 and b != 9 else 7
        elif now == 7:
            if b != 32 and b != 9:
                now = 5
        elif now == 0 and quote >= 0 and b == quote:
            now = 2
        elif now == 0 and ignore_leading and (b == 32 or b == 9):
            now = 0
        else:
            now = 1
    state[0] = now
    return np.int64(-1)


@kernel
def _escapes(first: int, second: int, quote: int, escape: int) -> bool:
    """Returns whether two characters in a quoted CSV value are an escape sequence for the second character."""
    return (first in (quote, escape) and second == quote) or (first == escape and second == escape)


@kernel
def _csv_lengths(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    flags: NDArray[np.uint8],
    fields: NDArray[np.int64],
    escape: int,
    quote: int,
    null: NDArray[np.uint8],
    empty: NDArray[np.uint8],
    empty_is_null: bool,
    offsets: NDArray[np.int32],
    valid: NDArray[np.uint8],
) -> np.int64:
    size = np.int64(0)
    offsets[0] = 0
    for i in range(fields.shape[0]):
        f = fields[i]
        begin = starts[f]
        end = ends[f]
        length = end - begin
        flag = flags[f]
        ok = 1
        if flag >= 2:
            p = begin
            while p < end:
                if p + 1 < end and _escapes(data[p], data[p + 1], quote, escape):
                    length -= 1
                    p += 1
                p += 1
        if flag == 1 and length == 0:
            length = np.int64(0) if empty_is_null else np.int64(empty.shape[0])
            ok = 0 if empty_is_null else 1
        elif flag == 0 and length == 0:
            ok = 0
        elif length == null.shape[0] and flag < 2:
            same = True
            for j in range(length):
                if data[begin + j] != null[j]:
                    same = False
            if same:
                ok = 0
                length = np.int64(0)
        size += length
        valid[i] = ok
        offsets[i + 1] = np.int32(size) if size < 2147483648 else np.int32(0)
    return size


@kernel
def _csv_bytes(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    flags: NDArray[np.uint8],
    fields: NDArray[np.int64],
    escape: int,
    quote: int,
    empty: NDArray[np.uint8],
    offsets: NDArray[np.int32],
    valid: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> None:
    for i in range(fields.shape[0]):
        if valid[i] == 0:
            continue
        f = fields[i]
        begin = starts[f]
        end = ends[f]
        at = np.int64(offsets[i])
        if flags[f] == 1 and begin == end:
            for j in range(empty.shape[0]):
                out[at + j] = empty[j]
        elif flags[f] < 2:
            copy_bytes(data, begin, out, at, end - begin)
        else:
            p = begin
            while p < end:
                if p + 1 < end and _escapes(data[p], data[p + 1], quote, escape):
                    p += 1
                out[at] = data[p]
                at += 1
                p += 1


@kernel
def _frame_json(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    status: NDArray[np.uint8],
) -> None:
    for i in range(starts.shape[0]):
        depth = 0
        quoted = False
        escaped = False
        begun = False
        wrong = 0
        for at in range(starts[i], ends[i]):
            b = data[at]
            if quoted:
                if escaped:
                    escaped = False
                elif b == 92:
                    escaped = True
                elif b == 34:
                    quoted = False
                if b < 32:
                    wrong = 4
                    break
                continue
            if b == 32 or b == 9 or b == 13 or b == 10:
                continue
            if depth == 0:
                if begun:
                    wrong = 3
                    break
                if b != 123:
                    wrong = 1
                    break
                begun = True
                depth = 1
            elif b == 34:
                quoted = True
            elif b == 123 or b == 91:
                depth += 1
            elif b == 125 or b == 93:
                depth -= 1
        if wrong == 0 and not begun:
            wrong = 5
        if wrong == 0 and depth != 0:
            wrong = 2
        status[i] = wrong


@kernel
def _braced_lines(data: NDArray[np.uint8]) -> np.int64:
    size = data.shape[0]
    if size < 2 or data[0] != 123 or data[size - 1] != 125:
        return np.int64(0)
    lines = np.int64(1)
    at = 0
    while at < size:
        end = at + 8
        if end <= size:
            # Subtracting 32 sets the high bit of a byte below 32. Only such a byte borrows from the next one.
            word = load64(data, at)
            if (word - _SPACES) & ~word & _HIGH_BITS == np.uint64(0):
                at = end
                continue
        else:
            end = size
        for place in range(at, end):
            if data[place] < 32:
                if data[place] != 10 or data[place - 1] != 125 or data[place + 1] != 123:
                    return np.int64(0)
                lines += 1
        at = end
    return lines
