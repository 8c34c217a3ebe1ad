"""Parses the text of a query into a tree of sqlglot nodes, in Spark's dialect with Flink's window functions.

Only the grammar of sqlglot is used. A call of a function becomes an `exp.Anonymous` node with the name as it was
written. Functions are defined only by the tables in `functions/`, so their meaning does not depend on the version of
sqlglot.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token, TokenType

from tidegate.storage.errors import ConfigurationError

WINDOW_TABLES = ("TUMBLE", "HOP", "CUMULATE", "SESSION")
"""Names of the window functions in FROM, which assign the rows of a table to windows."""

_KEPT = ("CAST", "TRY_CAST", "EXTRACT", "TRIM", "SUBSTRING", "POSITION")
"""Functions with a special grammar, for which the nodes of sqlglot are kept."""


class _Parser(SparkParser):
    FUNCTIONS: ClassVar[dict[str, Any]] = {}
    FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {
        **{name: parse for name, parse in SparkParser.FUNCTION_PARSERS.items() if name in _KEPT},
        **dict.fromkeys(WINDOW_TABLES, lambda self: self._parse_window_table()),
    }
    FUNC_TOKENS: ClassVar[set[TokenType]] = {*SparkParser.FUNC_TOKENS, TokenType.SESSION}

    def _parse_window_table(self) -> exp.Expr:
        """Parses the arguments of `TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECONDS)`."""
        name = self._tokens[self._index - 2]
        arguments = self._parse_csv(self._parse_window_argument)
        if arguments and isinstance(arguments[0], exp.Tuple):  # PARTITION BY has parsed all further arguments as keys
            found = arguments[0].expressions
            keys = next((n for n, each in enumerate(found) if is_call(each, "DESCRIPTOR")), len(found))
            arguments = [exp.Tuple(expressions=found[:keys]), *found[keys:], *arguments[1:]]
        return exp.Anonymous(this=name.text.upper(), expressions=arguments).update_positions(name)

    def _parse_window_argument(self) -> exp.Expr | None:
        label = None
        if self._next is not None and self._next.token_type is TokenType.FARROW:
            label = self._curr.text.upper()
            self._advance(2)
        if not self._match(TokenType.TABLE):
            argument = self._parse_disjunction()
        else:
            table = self._parse_table_parts()
            keys = self._parse_csv(self._parse_disjunction) if self._match(TokenType.PARTITION_BY) else []
            argument = exp.Tuple(expressions=[table, *keys])
        return argument if label is None else exp.PropertyEQ(this=exp.var(label), expression=argument)


class _Dialect(Spark):
    Parser = _Parser


def is_call(node: object, *names: str) -> bool:
    """Returns whether a node calls a function with one of these names, in capitals."""
    return isinstance(node, exp.Anonymous) and str(node.name).upper() in names


def parse(text: str) -> exp.Expr:
    """Returns the sqlglot tree of a query text with one statement.

    Raises ConfigurationError, with line and column, for a text that is not SQL.
    """
    if not isinstance(text, str):
        raise ConfigurationError(f"sql takes the text of a query, not {type(text).__name__}")
    dialect = _Dialect()
    tokens: list[Token] = []
    try:
        tokens = _plain(_tokens(dialect, text))
        statements = [each for each in dialect.parser().parse(tokens, text) if each is not None]
    except ParseError as error:
        start = next((each for each in tokens if each.token_type is not TokenType.L_PAREN), None)
        if start is not None and start.token_type is TokenType.VAR:
            raise ConfigurationError(
                f"SQL, line {start.line}, column {start.col - len(start.text) + 1}: the query begins with "
                f"{start.text!r}, and not with SELECT or WITH: correct the word"
            ) from error
        (first, *_) = error.errors or [{}]
        reason = _INTERNAL.sub("a part of the expression is missing", str(first.get("description") or error)).rstrip(
            "."
        )
        where = f", line {first['line']}, column {_column(first['col'], first)}" if "line" in first else ""
        raise ConfigurationError(
            f"SQL{where}: {reason}, near {_near(first, text)!r}: correct the query there"
        ) from error
    except TokenError as error:
        raise ConfigurationError(
            f"SQL: the text cannot be split into words: {error}; check its quotes and comments"
        ) from error
    if len(statements) != 1:
        raise ConfigurationError(f"sql takes one statement, not {len(statements)}; call it for each")
    return statements[0]


_INTERNAL = re.compile(r"Required keyword: '\w+' missing for <class '[^']*'>")
"""Text of sqlglot for an expression without an operand, which names a class of its parser."""
_JOINED = re.compile(r"(?:\d+\.?\d*|\.\d+)[eE]\d+(?=[+-])")
"""A number with an exponent, at the start of a token that also has the sum or the difference behind it."""


def _tokens(dialect: Spark, text: str) -> list[Token]:
    """Returns the tokens of a text, with their places in it.

    sqlglot reads `1e3+2` as one number, and `1e3-1e2` as a name. Such a number is split from what follows it, as in
    `1e3 +2`.
    """
    blanks: list[int] = []  # where blanks were added, as places in `split`
    split = text
    while True:
        tokens: list[Token] = list(dialect.tokenize(split))
        found = [
            _JOINED.match(split, token.start, token.end + 1)
            for token in tokens
            if token.token_type in (TokenType.NUMBER, TokenType.VAR)
        ]
        places = [match.end() for match in found if match is not None]
        if not places:
            break
        blanks = [place + bisect_left(places, place + 1) for place in blanks]
        blanks = sorted([*blanks, *(place + number for number, place in enumerate(places))])
        split = " ".join(split[start:end] for start, end in pairwise([0, *places, len(split)]))
    for token in tokens if blanks else ():
        line = split.rfind("\n", 0, token.end) + 1
        before, after = bisect_left(blanks, token.start), bisect_left(blanks, token.end)
        token.col -= after - bisect_left(blanks, line)
        token.start -= before
        token.end -= after
    return tokens


def _plain(tokens: Iterable[Token]) -> list[Token]:
    """Returns the tokens of a query.

    Changes the token of `window` before `(`, so that it is parsed as a call of Spark's function and not as a clause.
    """
    found = list(tokens)
    for token, following in pairwise(found):
        if token.token_type is TokenType.WINDOW and following.token_type is TokenType.L_PAREN:
            token.token_type = TokenType.VAR
    return found


def _column(end: int, error: dict[str, Any]) -> int:
    """Returns the column at which a word begins. `end` is the column at which sqlglot reports that the word ends."""
    return max(1, end - len(str(error.get("highlight") or "x")) + 1)


def _near(error: dict[str, Any], text: str) -> str:
    word = f"{str(error.get('start_context') or '')[-20:]}{error.get('highlight') or ''}"
    return word.strip() or text.strip()[:40]


_SHOWN = 80


def place(node: exp.Expr) -> str:
    """Returns the place of a node in the query, such as `line 1, column 8`. Empty if unknown."""
    metas = [each.meta for each in node.find_all(exp.Expr) if "line" in each.meta]
    if not metas:
        return place(node.parent) if node.parent is not None else ""
    first = min(metas, key=lambda meta: int(meta["start"]))
    column = int(first["col"]) - (int(first["end"]) - int(first["start"]))
    return f"line {first['line']}, column {max(1, column)}"


def shown(node: exp.Expr) -> str:
    """Returns a part of the query as one line, shortened to `_SHOWN` characters."""
    spark = None if isinstance(node, exp.Unnest | exp.Join) else "spark"  # which writes UNNEST as EXPLODE
    text = node.sql(dialect=spark)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def refused(node: exp.Expr, why: str) -> ConfigurationError:
    """Returns the error for a part of the query that is not supported.

    The text has the place, the part, and `why`: the reason and what to write instead.
    """
    return ConfigurationError(f"SQL, {place(node) or 'here'}: {shown(node)}: {why}")


def check_only(node: exp.Expr, *words: str) -> None:
    """Raises ConfigurationError if a node has a clause that is not one of `words`, so that no clause is ignored."""
    for word, found in node.args.items():
        if found and word not in words:
            parts = [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, exp.Expr)]
            name = word.rstrip("_").replace("_", " ").upper()
            raise refused(parts[0] if parts else node, f"{name} is not covered here; see docs/sql.md")


@contextmanager
def errors_at(node: exp.Expr) -> Iterator[None]:
    """Returns a context manager that adds the place of a query part to the ConfigurationErrors of steps that are added
    inside.
    """
    try:
        yield
    except ConfigurationError as error:
        if str(error).startswith("SQL"):
            raise
        raise ConfigurationError(f"SQL, {place(node) or 'here'}: {error}") from error
