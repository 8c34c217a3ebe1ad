"""Shows checkpoints on a terminal: what the commands in `checkpoints_command.py` print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tidegate.recovery.checkpoints import CheckpointSummary
from tidegate.recovery.contents.differences import CheckpointDiff, OperatorDiff, SplitDiff, StateDiff
from tidegate.recovery.contents.inspection import CheckpointReport, OperatorReport, read_splits
from tidegate.recovery.contents.state_catalog import StateInfo
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    SectionRef,
    StateHandle,
    StoredSplit,
    SubtaskState,
)

_SPLITS_SHOWN = 3
"""So many splits of a source are named."""


def print_checkpoints(summaries: Iterable[CheckpointSummary]) -> None:
    """Print a table of checkpoints and savepoints."""
    table = Table("checkpoint", "job", "triggered (UTC)", "state bytes", "subtasks", "condition")
    for summary in summaries:
        table.add_row(*(escape(cell) for cell in _row(summary)))
    make_console().print(table)


def print_checkpoint(metadata: CheckpointMetadata) -> None:
    """Print what a checkpoint or savepoint holds: its operators and their states."""
    console = make_console()
    kind = "void (given up)" if metadata.void else "final" if metadata.final else "completed"
    what = "Savepoint" if metadata.origin_root is not None else "Checkpoint"
    console.print(
        f"{what} {metadata.checkpoint_id} of job {metadata.job_id}, {kind}, attempt {metadata.attempt}, "
        f"triggered {time_text(metadata.triggered_at_ms)} UTC, {metadata.size_bytes:,} bytes of state",
        markup=False,
    )
    if metadata.restored_from:
        console.print(f"The job was restored from {metadata.restored_from}", markup=False)
    operators = Table("operator uid", "name", "vertex", "parallelism", "max", title="Operators", title_justify="left")
    for operator in metadata.operators:
        cells = (operator.uid, operator.name, operator.vertex, operator.parallelism, operator.max_parallelism)
        operators.add_row(*(escape(str(cell)) for cell in cells))
    console.print(operators)
    console.print(_states(metadata))
    _print_splits(console, metadata)


def _print_splits(console: Console, metadata: CheckpointMetadata) -> None:
    """Print the splits of sources that are in no state of a subtask."""
    waiting = [(pool.uid, pool.splits) for pool in metadata.pools]
    read = read_splits(metadata)
    if waiting:
        console.print(_splits("Splits that no subtask had taken", waiting))
    if read:
        console.print(_splits("Splits that finished subtasks had read to the end", read.items()))


def _format(metadata: CheckpointMetadata) -> str:
    return "" if metadata.savepoint_format is None else f"{metadata.savepoint_format.value} savepoint of "


def print_report(report: CheckpointReport) -> None:
    """Print the operators of a checkpoint and their states."""
    console = make_console()
    metadata = report.metadata
    console.print(
        f"{report.path}: {_format(metadata)}job {metadata.job_name}, "
        f"triggered {time_text(metadata.triggered_at_ms)} UTC, "
        f"{report.size_bytes:,} bytes of state, {report.in_flight_bytes:,} of them in flight",
        markup=False,
        soft_wrap=True,
    )
    for url in report.needs:
        console.print(f"It needs {url}", markup=False, soft_wrap=True)
    table = Table("operator uid", "parallelism", "max", "keys", "finished", "bytes", "state", "kind", "rows", "bytes")
    for operator in report.operators:
        for number, state in enumerate(operator.states or (None,)):
            cells = (*(_operator_cells(operator) if number == 0 else [""] * 6), *_state_cells(state))
            table.add_row(*map(escape, cells))
    console.print(table)
    _print_splits(console, metadata)


def print_diff(diff: CheckpointDiff) -> None:
    """Print what has changed. Operators that are the same are only counted."""
    console = make_console()
    old_bytes, new_bytes = diff.size_bytes
    console.print(
        f"{diff.old}: {old_bytes:,} bytes\n{diff.new}: {new_bytes:,} bytes ({new_bytes - old_bytes:+,})",
        markup=False,
        soft_wrap=True,
    )
    table = Table("operator uid", "", "parallelism", "max", "bytes", "state", "", "bytes", "keys")
    for operator in diff.changed:
        for number, state in enumerate(operator.states or (None,)):
            cells = (*(_changed_cells(operator) if number == 0 else [""] * 5), *_changed_state(state))
            table.add_row(*map(escape, cells))
    if diff.changed:
        console.print(table)
    for positions in _positions(diff):
        console.print(positions)
    same = len(diff.operators) - len(diff.changed)
    console.print(f"{same} operators are the same", markup=False)


def _positions(diff: CheckpointDiff) -> Iterator[Table]:
    """A table of the splits of sources that have moved, up to `_SPLITS_SHOWN` of each source."""
    table = Table("operator uid", "split", "next row", title="Positions of sources", title_justify="left")
    for operator in diff.changed:
        for split in operator.splits[:_SPLITS_SHOWN]:
            table.add_row(*map(escape, (operator.uid, split.split_id, _moved(split))))
        if len(operator.splits) > _SPLITS_SHOWN:
            table.add_row(escape(operator.uid), f"and {len(operator.splits) - _SPLITS_SHOWN} more", "")
        if any(operator.waiting_splits):
            table.add_row(escape(operator.uid), "splits that no subtask had taken", _pair(*operator.waiting_splits))
        if any(operator.read_splits):
            table.add_row(escape(operator.uid), "splits read to the end", _pair(*operator.read_splits))
    if table.row_count:
        yield table


def _moved(split: SplitDiff) -> str:
    """The next row in both checkpoints, or that a finished subtask had read the split to its end."""
    old, new = ("read" if read else _number(offset) for offset, read in zip(split.next_offset, split.read, strict=True))
    return f"{old} -> {new}"


def _operator_cells(operator: OperatorReport) -> list[str]:
    finished = f"{operator.finished_subtasks} of {operator.parallelism}" if operator.finished_subtasks else ""
    sizes = (str(operator.parallelism), str(operator.max_parallelism))
    return [operator.uid, *sizes, ", ".join(operator.keys), finished, f"{operator.size_bytes:,}"]


def _state_cells(state: StateInfo | None) -> list[str]:
    if state is None:
        return ["", "", "", ""]
    kind = state.kind.value
    kind += f", {state.backend}" if state.backend else f", {state.layers} layers" if state.layers else ""
    return [state.state, kind, _number(state.rows), _number(state.size_bytes)]


def _changed_cells(operator: OperatorDiff) -> list[str]:
    pairs = (operator.parallelism, operator.max_parallelism, operator.size_bytes)
    return [operator.uid, operator.change, *(_pair(*pair) for pair in pairs)]


def _changed_state(state: StateDiff | None) -> list[str]:
    if state is None:
        return ["", "", "", ""]
    keys = state.keys
    counts = "" if keys is None else f"+{keys.added:,} -{keys.removed:,} ~{keys.changed:,} ={keys.same:,}"
    return [state.state, state.change, _pair(*state.size_bytes), counts]


def _pair(old: int | None, new: int | None) -> str:
    return _number(old) if old == new else f"{_number(old)} -> {_number(new)}"


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _row(summary: CheckpointSummary) -> Iterator[str]:
    readable = summary.verified is not False
    yield summary.path
    yield summary.job_name
    yield time_text(summary.triggered_at_ms) if readable else "?"
    yield f"{summary.size_bytes:,}" if readable else "?"
    yield str(summary.subtasks) if readable else "?"
    yield "readable" if readable else f"damaged: {summary.reason}"


def _states(metadata: CheckpointMetadata) -> Table:
    table = Table("vertex", "subtask", "operator uid or edge", "state", "kind", "rows", "bytes", "where", title="State")
    table.title_justify = "left"
    for subtask in metadata.subtasks:
        for cells in _state_rows(subtask):
            table.add_row(*(escape(str(cell)) for cell in (subtask.vertex, subtask.subtask, *cells)))
    return table


def _splits(title: str, sources: Iterable[tuple[str, Sequence[StoredSplit]]]) -> Table:
    table = Table("operator uid", "splits", "rows", "the first of them", title=title, title_justify="left")
    for uid, splits in sources:
        rows = None if any(split.rows < 0 for split in splits) else sum(split.rows for split in splits)
        first = ", ".join(split.split_id for split in splits[:_SPLITS_SHOWN])
        more = ", ..." if len(splits) > _SPLITS_SHOWN else ""
        table.add_row(*map(escape, (uid, _number(len(splits)), _number(rows), first + more)))
    return table


def _state_rows(subtask: SubtaskState) -> Iterator[tuple[str, ...]]:
    layers = [(f", layer {number}", handle) for number, handle in enumerate(subtask.layers)]
    whole = [] if subtask.handle is None else [("", subtask.handle)]
    for note, handle in (*layers, *whole):
        for section in handle.sections:
            kind = f"{section.kind.value}{note}{', removed keys' if section.removed else ''}"
            yield _section_row(section, kind, handle)
    for native in subtask.native:
        yield native.uid, "", f"keyed, {native.backend}", "?", f"{native.size_bytes:,}", f"{len(native.files)} files"
    if subtask.in_flight is not None:
        for section in subtask.in_flight.sections:
            yield _section_row(section, "in flight", subtask.in_flight)


def _section_row(section: SectionRef, kind: str, handle: StateHandle) -> tuple[str, ...]:
    rows, size = f"{section.rows:,}", f"{section.length_bytes:,}"
    return section.uid, section.state, kind, rows, size, handle.path or "inlined"


def time_text(at_ms: int) -> str:
    """A time in UTC, to the millisecond."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")


def make_console() -> Console:
    """A console on standard output. If that is no terminal, it is wide enough for whole paths."""
    console = Console()
    return console if console.is_terminal else Console(width=2_000)
