"""Reads and writes the binary encoding of Avro: converts records of one schema to columns, and back.

A schema is a program with four integers for each instruction: the operation, its column (SKIPPED: the value is
skipped), an argument, and a position in the program. One loop runs it for each record.

Rules:

- `scan_avro` checks every byte of each record before any value is read. A record that is cut off, too long, or of
  another schema is reported with the reason and the instruction at which it was found, and changes no count. It never
  reads beyond the end of its record.
- For each column, `scan_avro` also counts the entries, and the bytes or elements in them. So `take_avro` writes into
  one buffer that has exactly the needed size.
- A null record or value has an entry in each of its columns, so that columns of one struct have the same length. A null
  list has no elements.
- `put_avro` is the inverse. It reads the same columns, with an entry for each null, and writes records one after the
  other: first only to measure them, and then into a buffer of that size.
- Every element of a list has at least one byte (`connectors/formats/avro_schema.py` refuses other lists), so a wrong
  count in a damaged record cannot cause an endless loop.
- Numbers are little-endian in Avro and in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.byte_strings import copy_bytes
from tidegate.state.kernels.jit import kernel

SKIPPED = -1
WIDTH = 4
"""How many integers an instruction has."""
JUMP, BOOL, FLOAT, DOUBLE, FIXED, DECIMAL_FIXED, NEXT = range(7)
INT, LONG, ENUM, BYTES, DECIMAL, OPTION, LIST, BRANCH = range(10, 18)
"""The operations. From INT on, they begin with a variable-length integer.

- FIXED, DECIMAL_FIXED: the argument is the size. ENUM, BRANCH: the number of symbols or branches.
- OPTION: a value or null; the argument is the branch of null, the position is after the value.
- LIST: the begin of a block of elements; the argument is the first instruction of an element, the position is behind
  the list. The element ends with NEXT, with the position of its first instruction, and another LIST follows.
- BRANCH: followed by a JUMP for each branch. Its value is only skipped, so it has no column.
"""
CUT, LONG_VARINT, BAD_BOOL, INT_RANGE, ENUM_RANGE, BRANCH_RANGE, BAD_LENGTH, BAD_COUNT, TRAILING, WIDE_DECIMAL = range(
    1, 11
)
"""The reasons why a record cannot be read. WIDE_DECIMAL is also a reason why a record cannot be written."""


@dataclass(frozen=True, slots=True)
class AvroScan:
    """The results of `scan_avro`. For each record, `status` is 0 if it is valid, and otherwise `faults` is the program
    instruction at which the error was found.
    """

    status: NDArray[np.int64]
    faults: NDArray[np.int64]
    counts: NDArray[np.int64]
    """The number of entries of each column, in all valid records."""
    sizes: NDArray[np.int64]
    """For each column: bytes of its values, or elements of its lists."""


def scan_avro(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    program: NDArray[np.int64],
    columns: int,
    depth: int,
    *,
    in_sequence: bool = False,
) -> AvroScan:
    """Checks Avro records in `data` and counts their entries.

    `program` describes the schema. `depth`: how deep lists are nested. `in_sequence`: each record begins where the
    previous one ends. In that case `starts` and `ends` are first the limits of the records, and are then set to their
    actual bounds. Records after an invalid one are not checked.
    """
    status = np.zeros(len(starts), dtype=np.int64)
    faults = np.zeros(len(starts), dtype=np.int64)
    counts = np.zeros(columns, dtype=np.int64)
    sizes = np.zeros(columns, dtype=np.int64)
    bases = np.zeros(columns, dtype=np.int64)
    nothing = np.zeros(8, dtype=np.uint8)
    _run(
        data,
        starts,
        ends,
        program,
        counts,
        sizes,
        np.zeros(2 * columns, dtype=np.int64),
        bases,
        bases,
        np.zeros(depth + 1, dtype=np.int64),
        nothing,
        nothing.view(np.int32),
        nothing.view(np.int64),
        status,
        faults,
        False,
        in_sequence,
    )
    return AvroScan(status, faults, counts, sizes)


def take_avro(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    program: NDArray[np.int64],
    depth: int,
    out: NDArray[np.uint8],
    entries_at: NDArray[np.int64],
    data_at: NDArray[np.int64],
) -> None:
    """Writes the values of Avro records into the buffer `out`. `scan_avro` must have found all records valid.

    `entries_at`: the byte at which the entries of each column begin, a multiple of 16. `data_at`: the same for the
    bytes of its values. Entries have one byte for BOOL and OPTION; four bytes for INT, ENUM, FLOAT, BYTES and LIST
    (offsets, one more than there are entries, of which the first is not written); eight for LONG and DOUBLE; 16 for
    decimals.
    """
    columns = len(entries_at)
    nothing = np.zeros(len(starts), dtype=np.int64)
    _run(
        data,
        starts,
        ends,
        program,
        np.zeros(columns, dtype=np.int64),
        np.zeros(columns, dtype=np.int64),
        np.zeros(2 * columns, dtype=np.int64),
        entries_at,
        data_at,
        np.zeros(depth + 1, dtype=np.int64),
        out,
        out.view(np.int32),
        out.view(np.int64),
        nothing,
        nothing,
        True,
        False,
    )


@dataclass(frozen=True, slots=True)
class AvroRecordBytes:
    """The records that `put_avro` wrote: record i is `data` from `offsets[i]` to `offsets[i + 1]`.

    For each record, `status` is 0 if it is valid, and otherwise `faults` is the program instruction at which the error
    was found.
    """

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    status: NDArray[np.int64]
    faults: NDArray[np.int64]


def put_avro(
    values: NDArray[np.uint8],
    entries_at: NDArray[np.int64],
    data_at: NDArray[np.int64],
    rows: int,
    header: bytes,
    program: NDArray[np.int64],
    depth: int,
) -> AvroRecordBytes:
    """Writes an Avro record for each row, after the bytes `header`.

    `values` has the entries and bytes of the columns, in the layout of `take_avro`.
    """
    status = np.zeros(rows, dtype=np.int64)
    faults = np.zeros(rows, dtype=np.int64)
    sizes = np.zeros(rows, dtype=np.int64)
    columns = len(entries_at)
    head = np.frombuffer(header, dtype=np.uint8)
    places = (values, values.view(np.int32), values.view(np.int64), entries_at, data_at, program, head)
    stack = np.zeros(depth + 1, dtype=np.int64)
    nothing = np.zeros(1, dtype=np.uint8)
    _put(*places, np.zeros(columns, dtype=np.int64), stack, nothing, sizes, status, faults, False)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    data = np.empty(int(offsets[-1]), dtype=np.uint8)
    _put(*places, np.zeros(columns, dtype=np.int64), stack, data, sizes, status, faults, True)
    return AvroRecordBytes(data, offsets, status, faults)


@kernel
def _put_integer(data: NDArray[np.uint8], at: np.int64, value: np.int64, write: bool) -> np.int64:
    """Writes an integer in Avro's variable-length encoding if `write` is True. Returns the position after it."""
    rest = np.uint64((value << 1) ^ (value >> 63))
    while rest >= np.uint64(128):
        if write:
            data[at] = np.uint8((rest & np.uint64(127)) | np.uint64(128))
        at += 1
        rest >>= np.uint64(7)
    if write:
        data[at] = np.uint8(rest)
    return at + 1


@kernel
def _put(
    in8: NDArray[np.uint8],
    in32: NDArray[np.int32],
    in64: NDArray[np.int64],
    entries_at: NDArray[np.int64],
    data_at: NDArray[np.int64],
    program: NDArray[np.int64],
    header: NDArray[np.uint8],
    counts: NDArray[np.int64],
    stack: NDArray[np.int64],
    data: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    status: NDArray[np.int64],
    faults: NDArray[np.int64],
    write: bool,
) -> None:
    """Runs the program of a schema for each row. Writes the records or, if `write` is False, only measures them."""
    length = len(program) // WIDTH
    at = np.int64(0)
    for record in range(len(sizes)):
        begin = at
        for each in range(len(header)):
            if write:
                data[at] = header[each]
            at += 1
        pc = np.int64(0)
        depth = 0
        null_end = np.int64(-1)
        while pc < length:
            op = program[4 * pc]
            column = program[4 * pc + 1]
            argument = program[4 * pc + 2]
            target = program[4 * pc + 3]
            here = pc
            pc += 1
            if here >= null_end:
                null_end = np.int64(-1)
            null = here < null_end
            entry = np.int64(0)
            if column >= 0:
                entry = counts[column]
                counts[column] += 1
            if op == LONG:
                if not null:
                    at = _put_integer(data, at, in64[(entries_at[column] >> 3) + entry], write)
            elif op in (INT, ENUM):
                if not null:
                    at = _put_integer(data, at, np.int64(in32[(entries_at[column] >> 2) + entry]), write)
            elif op == BYTES:
                if not null:
                    first = np.int64(in32[(entries_at[column] >> 2) + entry])
                    size = np.int64(in32[(entries_at[column] >> 2) + entry + 1]) - first
                    at = _put_integer(data, at, size, write)
                    if write:
                        copy_bytes(in8, data_at[column] + first, data, at, size)
                    at += size
            elif op == OPTION:
                if not null:
                    is_null = in8[entries_at[column] + entry] == 0
                    at = _put_integer(data, at, argument if is_null else 1 - argument, write)
                    if is_null:
                        null_end = target
            elif op in (BOOL, FLOAT, DOUBLE, FIXED):
                size = np.int64(8) if op == DOUBLE else np.int64(4) if op == FLOAT else np.int64(1)
                if op == FIXED:
                    size = argument
                if not null:
                    if write:
                        begin_at = entries_at[column] + entry * size
                        for each in range(size):
                            data[at + each] = in8[begin_at + each]
                    at += size
            elif op in (DECIMAL, DECIMAL_FIXED):
                if not null:
                    begin_at = entries_at[column] + entry * 16
                    sign = np.int64(255) if in8[begin_at + 15] >= 128 else np.int64(0)
                    size = np.int64(16)
                    # Bytes at the top that repeat the sign are left away.
                    while size > 1 and in8[begin_at + size - 1] == sign:
                        if (in8[begin_at + size - 2] >= 128) != (sign > 0):
                            break
                        size -= 1
                    wide = size
                    if op == DECIMAL_FIXED:
                        wide = argument
                        if size > wide:
                            status[record] = WIDE_DECIMAL
                            faults[record] = here
                    else:
                        at = _put_integer(data, at, size, write)
                    if write:
                        for each in range(wide):
                            data[at + wide - 1 - each] = in8[begin_at + each] if each < 16 else np.uint8(sign)
                    at += wide
            elif op == LIST:
                if here + 1 != argument:
                    # The end of a list, which has one entry for both instructions.
                    counts[column] -= 1
                    at = _put_integer(data, at, np.int64(0), write)
                    pc = target
                elif null:
                    pc = target
                else:
                    first = np.int64(in32[(entries_at[column] >> 2) + entry])
                    size = np.int64(in32[(entries_at[column] >> 2) + entry + 1]) - first
                    at = _put_integer(data, at, size, write)
                    if size == 0:
                        pc = target
                    else:
                        stack[depth] = size
                        depth += 1
                        pc = argument
            elif op == NEXT:
                stack[depth - 1] -= 1
                if stack[depth - 1] > 0:
                    pc = target
                else:
                    depth -= 1
            elif op == JUMP:
                pc = target
            elif op == BRANCH:
                at = _put_integer(data, at, np.int64(0), write)
        sizes[record] = at - begin


@kernel
def _run(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    program: NDArray[np.int64],
    counts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    saved: NDArray[np.int64],
    entries_at: NDArray[np.int64],
    data_at: NDArray[np.int64],
    stack: NDArray[np.int64],
    out8: NDArray[np.uint8],
    out32: NDArray[np.int32],
    out64: NDArray[np.int64],
    status: NDArray[np.int64],
    faults: NDArray[np.int64],
    write: bool,
    in_sequence: bool,
) -> None:
    """Runs the program of a schema for each record. Writes the values or, if `write` is False, only counts them."""
    columns = len(counts)
    length = len(program) // WIDTH
    for record in range(len(starts)):
        at = starts[record]
        end = ends[record]
        failed = 0
        pc = np.int64(0)
        depth = 0
        here = np.int64(0)
        null_end = -1
        if not write:
            for each in range(columns):
                saved[each] = counts[each]
                saved[columns + each] = sizes[each]
        while pc < length:
            op = program[4 * pc]
            column = program[4 * pc + 1]
            argument = program[4 * pc + 2]
            target = program[4 * pc + 3]
            here = pc
            pc += 1
            if here >= null_end:
                null_end = -1
            null = here < null_end
            value = np.int64(0)
            if op >= INT and not null:
                shift = 0
                while True:
                    if at >= end:
                        failed = CUT
                        break
                    byte = np.int64(data[at])
                    at += 1
                    if shift == 63 and byte > 1:
                        failed = LONG_VARINT
                        break
                    value |= (byte & 127) << shift
                    if byte < 128:
                        break
                    shift += 7
                if failed != 0:
                    break
                value = ((value >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(value & 1)
            if INT <= op <= LONG:
                if op == INT and (value < -2147483648 or value > 2147483647):
                    failed = INT_RANGE
                    break
                if column >= 0:
                    if write:
                        if op == LONG:
                            out64[(entries_at[column] >> 3) + counts[column]] = value
                        else:
                            out32[(entries_at[column] >> 2) + counts[column]] = value
                    counts[column] += 1
            elif op == BYTES:
                if value < 0:
                    failed = BAD_LENGTH
                    break
                if value > end - at:
                    failed = CUT
                    break
                if column >= 0:
                    if write:
                        to = data_at[column] + sizes[column]
                        copy_bytes(data, at, out8, to, value)
                        out32[(entries_at[column] >> 2) + counts[column] + 1] = sizes[column] + value
                    counts[column] += 1
                    sizes[column] += value
                at += value
            elif op == OPTION:
                if not null:
                    if value != 0 and value != 1:
                        failed = BRANCH_RANGE
                        break
                    if value == argument:
                        null = np.bool_(True)
                        if column >= 0:
                            null_end = target
                        else:
                            pc = target
                if column >= 0:
                    if write:
                        out8[entries_at[column] + counts[column]] = 0 if null else 1
                    counts[column] += 1
            elif FLOAT <= op <= DOUBLE:
                size = 8 if op == DOUBLE else 4
                if not null:
                    if size > end - at:
                        failed = CUT
                        break
                    for each in range(size):
                        value |= np.int64(data[at + each]) << (8 * each)
                    at += size
                if column >= 0:
                    if write:
                        if op == DOUBLE:
                            out64[(entries_at[column] >> 3) + counts[column]] = value
                        else:
                            out32[(entries_at[column] >> 2) + counts[column]] = value
                    counts[column] += 1
            elif op == BOOL:
                if not null:
                    if at >= end:
                        failed = CUT
                        break
                    value = np.int64(data[at])
                    if value > 1:
                        failed = BAD_BOOL
                        break
                    at += 1
                if column >= 0:
                    if write:
                        out8[entries_at[column] + counts[column]] = value
                    counts[column] += 1
            elif op == ENUM:
                if value < 0 or value >= argument:
                    failed = ENUM_RANGE
                    break
                if column >= 0:
                    if write:
                        out32[(entries_at[column] >> 2) + counts[column]] = value
                    counts[column] += 1
            elif op == FIXED:
                if not null and argument > end - at:
                    failed = CUT
                    break
                if column >= 0:
                    if write:
                        to = entries_at[column] + counts[column] * argument
                        for each in range(argument):
                            out8[to + each] = 0 if null else data[at + each]
                    counts[column] += 1
                if not null:
                    at += argument
            elif op in (DECIMAL, DECIMAL_FIXED):
                wide = value
                if op == DECIMAL_FIXED and not null:
                    wide = argument
                if wide < 0:
                    failed = BAD_LENGTH
                    break
                if wide > end - at:
                    failed = CUT
                    break
                sign = np.int64(0)
                if wide > 0 and data[at] >= 128:
                    sign = np.int64(255)
                if wide > 16:
                    for each in range(wide - 16):
                        if data[at + each] != sign:
                            failed = WIDE_DECIMAL
                    if (data[at + wide - 16] >= 128) != (sign == 255):
                        failed = WIDE_DECIMAL
                    if failed != 0:
                        break
                if column >= 0:
                    if write:
                        to = entries_at[column] + counts[column] * 16
                        for each in range(16):
                            out8[to + each] = data[at + wide - 1 - each] if each < wide else sign
                    counts[column] += 1
                at += wide
            elif op == LIST:
                if null:
                    if column >= 0:
                        if write:
                            out32[(entries_at[column] >> 2) + counts[column] + 1] = sizes[column]
                        counts[column] += 1
                    pc = target
                    continue
                if value < 0:
                    value = -value
                    # The size of the block in bytes follows, which is not needed.
                    seen = 0
                    while True:
                        if at >= end:
                            failed = CUT
                            break
                        seen += 1
                        byte = np.int64(data[at])
                        at += 1
                        if byte < 128:
                            break
                        if seen == 10:
                            failed = LONG_VARINT
                            break
                    if failed != 0:
                        break
                if value < 0 or value > end - at:
                    failed = BAD_COUNT
                    break
                if value == 0:
                    if column >= 0:
                        if write:
                            out32[(entries_at[column] >> 2) + counts[column] + 1] = sizes[column]
                        counts[column] += 1
                    pc = target
                else:
                    stack[depth] = value
                    depth += 1
                    if column >= 0:
                        sizes[column] += value
                    pc = argument
            elif op == NEXT:
                stack[depth - 1] -= 1
                if stack[depth - 1] > 0:
                    pc = target
                else:
                    depth -= 1
            elif op == JUMP:
                pc = target
            elif op == BRANCH:
                if value < 0 or value >= argument:
                    failed = BRANCH_RANGE
                    break
                pc = pc + value
        if failed == 0 and at != end and not in_sequence:
            failed = TRAILING
            here = np.int64(length)
        if in_sequence:
            ends[record] = at
            if record + 1 < len(starts):
                starts[record + 1] = at
        if failed != 0:
            status[record] = failed
            faults[record] = here
            for each in range(columns):
                counts[each] = saved[each]
                sizes[each] = saved[columns + each]
            if in_sequence:
                break
