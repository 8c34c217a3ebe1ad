"""`StreamVerbs`: the verbs of DataFrames that people type: drop, rename, where, cast, limit, explode, branch, pipe.

Each is a short way to write steps that there are anyway. `Stream` inherits them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import pyarrow as pa

from tidegate.api.streams.steps.columns import schema_after
from tidegate.api.streams.steps.given import check_function
from tidegate.api.streams.steps.known_columns import known_schema
from tidegate.api.streams.steps.meanings import meaning
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.api.streams.steps.updating import after_function
from tidegate.operators.functions.batch_functions import Explode, Peek, Row
from tidegate.operators.functions.process_batches import process_operator
from tidegate.operators.functions.process_functions import Limit
from tidegate.protocol.side_outputs import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.polars_frames import check_polars_has, exact_column, is_polars_expression
from tidegate.storage.schemas.row_schemas import as_schema

if TYPE_CHECKING:
    import polars as pl

P = ParamSpec("P")
R = TypeVar("R")


class StreamVerbs(StreamSteps):
    """A stream whose columns can be dropped, renamed and cast by name."""

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in their order. ConfigurationError if they are not known before the job runs."""
        return list(known_schema(self, "columns").names)

    def where(
        self,
        condition: Callable[[Row], bool] | pl.Expr,
        *,
        name: str = "where",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Self:
        """Keep the rows for which a polars expression or a function of the row is true: `where(pl.col("x") > 1)`.

        It is `filter` under SQL's name.
        """
        return self.filter(condition, name=name, uid=uid, parallelism=parallelism, errors_to=errors_to)

    def drop(self, *columns: str | Iterable[str], name: str = "drop", uid: str | None = None) -> Self:
        """Leave columns out: `drop("a", "b")`. ConfigurationError for one that there is not, and for all of them."""
        schema = known_schema(self, name)
        dropped = _names(columns, name)
        _check_columns(dropped, schema, name)
        kept = [exact_column(column) for column in schema.names if column not in dropped]
        if not kept:
            raise ConfigurationError(f"{name}: no column is left; keep at least one")
        return self._select(kept, name, uid, None)

    def rename(
        self,
        mapping: Mapping[str, str] | Callable[[str], str],
        *,
        name: str = "rename",
        uid: str | None = None,
    ) -> Self:
        """Give columns other names: `rename({"old": "new"})`, or `rename(str.lower)`. The others keep theirs.

        ConfigurationError for a column that there is not, and where two columns would share a name.
        """
        schema = known_schema(self, name)
        if callable(mapping):
            mapping = {column: mapping(column) for column in schema.names}
        _check_columns(mapping, schema, name)
        after = [mapping.get(column, column) for column in schema.names]
        if doubles := sorted({column for column in after if after.count(column) > 1}):
            raise ConfigurationError(f"{name}: two columns would be called {doubles[0]!r}; choose another name")
        renamed = [exact_column(old).alias(new) for old, new in zip(schema.names, after, strict=True)]
        return self._select(renamed, name, uid, None)

    def cast(self, types: Mapping[str, Any], *, name: str = "cast", uid: str | None = None) -> Self:
        """Give columns other types: `cast({"n": int, "price": float, "d": pa.decimal128(9, 2)})`.

        A text that is no number fails the job, and so does a number that is too large. Fractions are cut off where
        floats become integers, as in Spark. ConfigurationError for a column that there is not, and for a cast that
        cannot be.
        """
        schema = known_schema(self, name)
        wanted = as_schema(types, f"{name}(types)")
        assert wanted is not None, "a mapping is a schema"
        _check_columns(wanted.names, schema, name)
        check_polars_has(wanted)
        import polars as pl

        dtypes = pl.DataFrame(wanted.empty_table()).schema
        return self._with_columns(
            [exact_column(column).cast(dtype) for column, dtype in dtypes.items()], name, uid, None
        )

    def limit(self, n: int, *, name: str = "limit", uid: str | None = None) -> Self:
        """The first `n` rows that arrive, exactly once over restarts. One subtask counts them.

        The job still reads its input to the end. ConfigurationError for a negative `n`.
        """
        if self._updating is not None:
            raise self._updating.refuse(name)
        factory = partial(process_operator, Limit(n), ((),), (self.timestamp,), self.schema, ())
        return self._then(factory, self.schema, name, uid, 1, meaning=meaning("limit", {"rows": n}))

    def explode(
        self,
        column: str,
        *,
        outer: bool = False,
        name: str = "explode",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Self:
        """A row for each element of a list: `explode("tags")`. The other columns are repeated.

        A row whose list is null or empty is left out, as with Spark's `explode`; with `outer=True` it stays, with null
        in the column, as with `explode_outer`. ConfigurationError for a column that is no list.
        """
        schema = known_schema(self, name)
        _check_columns([column], schema, name)
        operator = Explode(column, outer)
        after = schema_after(operator, schema, name)
        if self._updating is not None:
            raise self._updating.refuse(name)
        return self._then(partial(Explode, column, outer), after, name, uid, parallelism)

    def branch(
        self, condition: Callable[[Row], bool] | pl.Expr, *, name: str = "branch", uid: str | None = None
    ) -> tuple[Self, Self]:
        """Two streams, the rows for which a condition is true and all others: `big, small = s.branch(pl.col("x") > 9)`.

        Where an expression is null the row is among the others. The condition is computed twice for each row.
        """
        uids = (None, None) if uid is None else (uid, f"{uid}-others")
        if is_polars_expression(condition):
            import polars as pl

            others: Any = ~condition.fill_null(pl.lit(False))
        else:
            check_function(condition, name, 'a row, a dict, or a polars expression such as pl.col("x") > 1')
            others = partial(_is_not, condition)
        return self.filter(condition, name=name, uid=uids[0]), self.filter(others, name=f"not {name}", uid=uids[1])

    def peek(
        self,
        fn: Callable[[Row], object],
        *,
        name: str = "peek",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Self:
        """Call `fn` with each row, a dict, and pass the rows on unchanged: to look at a stream, or to count something.

        What `fn` returns is ignored, and what it changes in its dict changes no row. Rows come again after a restart.
        With `errors_to` a row for which `fn` raises goes to the side output of that name, as in `map`, and is not
        passed on.
        """
        check_function(fn, name, "a row, a dict")
        if errors_to is not None:
            return self.filter(
                partial(_seen_by, fn), traced=False, name=name, uid=uid, parallelism=parallelism, errors_to=errors_to
            )
        updating = after_function(self._updating, self.schema, repr(name))
        return self._then(partial(Peek, fn), self.schema, name, uid, parallelism, updating=updating)

    def print(
        self, prefix: str = "", *, name: str = "print", uid: str | None = None, parallelism: int | None = None
    ) -> Self:
        """Print each row as a dict, behind `prefix`, and pass the rows on unchanged.

        Rows are printed by the tasks. In a local environment that is this process; on Ray the driver shows the output
        of the tasks. Rows come again after a restart, and those of a stream with updates are all updates.
        """
        if not isinstance(prefix, str):
            raise ConfigurationError(f"print({prefix!r}): the prefix must be a string")
        return self.peek(partial(_print_row, prefix), name=name, uid=uid, parallelism=parallelism)

    def pipe(self, fn: Callable[Concatenate[Self, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `fn(stream, *args, **kwargs)`, so that functions chain: `s.pipe(cleaned).pipe(joined, other)`."""
        return fn(self, *args, **kwargs)


def _print_row(prefix: str, row: Row) -> None:
    print(f"{prefix}{row}", flush=True)


def _seen_by(fn: Callable[[Row], object], row: Row) -> bool:
    fn(row)
    return True


def _is_not(condition: Callable[[Row], bool], row: Row) -> bool:
    return not condition(row)


def _names(columns: Iterable[str | Iterable[str]], method: str) -> list[str]:
    names: list[str] = []
    for given in columns:
        names += [given] if isinstance(given, str) else given
    if not names:
        raise ConfigurationError(f"{method} needs at least one column")
    return names


def _check_columns(names: Iterable[object], schema: pa.Schema, method: str) -> None:
    for column in names:
        if column not in schema.names:
            raise ConfigurationError(f"{method}: there is no column {column!r}; there are {columns_text(schema)}")
