"""Helpers that the command groups of `tidegate` share: common options, error messages, JSON output, tables and times.

`main.py` combines the groups. Rules of every command:

- It imports the modules that it needs when it runs, so that `--help` is fast.
- It ends with 0 on success, 1 for a checkpoint that is damaged or cannot be read, and 2 for wrong usage.
- A TidegateError is printed as one sentence, without a traceback.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tidegate.storage.errors import ConfigurationError, TidegateError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_Found = TypeVar("_Found")

JobOption = Annotated[str | None, typer.Option("--job", help="Name or id of one job.")]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="<root>/<job>/chk-<number> or <folder>/savepoint-<job>-<number>")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RootArgument = Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint root: a folder or s3://bucket/prefix")]


@contextmanager
def explained() -> Iterator[None]:
    """Returns a context that prints a TidegateError as one sentence and ends the command with an exit code."""
    try:
        yield
    except ConfigurationError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except TidegateError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def print_found(found: _Found, as_json: bool, print_text: Callable[[_Found], None]) -> None:
    """Prints a result as JSON, or as text by calling `print_text`."""
    if as_json:
        print_json(found)
    else:
        print_text(found)


def print_json(value: object) -> None:
    """Prints a dataclass, or a collection of dataclasses, as one line of JSON.

    The names are the fields of the dataclasses. Sizes are in bytes, times in milliseconds since the epoch.
    """
    typer.echo(json.dumps(plain_value(value), ensure_ascii=False))


def plain_value(value: Any) -> Any:
    """Converts dataclasses, enumerations and tuples to values that JSON supports."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [plain_value(part) for part in value]
    if isinstance(value, dict):
        return {str(name): plain_value(part) for name, part in value.items()}
    return value


def time_text(at_ms: int) -> str:
    """Returns a time in ms since the epoch as text, in UTC, with milliseconds."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")


def make_console() -> Console:
    """Returns a console for standard output. If that is not a terminal, it is wide enough for complete paths."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=2_000)


def make_table(*columns: str, title: str | None = None) -> Table:
    """Returns an empty table with these column headings."""
    from rich.table import Table

    return Table(*columns, title=title, title_justify="left")


def add_row(table: Table, *cells: object) -> None:
    """Adds a row of plain text: brackets in it are not interpreted as markup."""
    from rich.markup import escape

    table.add_row(*(escape(str(cell)) for cell in cells))
