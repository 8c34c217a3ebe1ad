"""Translates the windows of a query: Flink's table functions in FROM, and Spark's functions in GROUP BY."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import polars as pl
from sqlglot import exp

from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.operators.windows.window_columns import WINDOW_END, WINDOW_START
from tidegate.operators.windows.window_specs import Cumulating, Session, Sliding, Tumbling
from tidegate.sql.expressions import Expressions
from tidegate.sql.operators import moved
from tidegate.sql.query_text import WINDOW_TABLES, errors_at, is_call, refused
from tidegate.sql.relations import WINDOW_TIME, BoundCondition, Name, Relation, Spec, Steps, all_of, columns_in
from tidegate.sql.typed_values import Interval, Typed
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

Translate = Callable[[exp.Expr], Typed]


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of one of Flink's window functions: its arguments after the table and the time column, and how they
    become a window specification.
    """

    arguments: tuple[str, ...]
    least: int
    make: Callable[..., Spec]


_FORMS: Mapping[str, _Form] = {
    "TUMBLE": _Form(("SIZE", "OFFSET"), 1, lambda size, offset=0: Tumbling(size, offset)),
    "HOP": _Form(("SLIDE", "SIZE", "OFFSET"), 2, lambda slide, size, offset=0: Sliding(size, slide, offset)),
    "CUMULATE": _Form(("STEP", "SIZE"), 2, lambda step, size: Cumulating(step, size)),
    "SESSION": _Form(("GAP",), 1, lambda gap: Session(gap)),
}
_BEFORE = ("DATA", "TIMECOL")


def window_call(node: exp.Table) -> exp.Expr | None:
    """Returns the call of a window function in FROM, also if it is inside TABLE(…). None if there is none."""
    call = node.this
    if is_call(call, "TABLE") and len(call.expressions) == 1:
        call = call.expressions[0]
    return call if is_call(call, *WINDOW_TABLES) else None


def windowed_table(call: exp.Expr, table: Callable[[exp.Expr], Relation], translate: Translate) -> Relation:
    """Returns the relation of a table with a window function. `table` translates the table.

    Raises ConfigurationError for a call that differs from Flink's form.
    """
    name = str(call.name)
    form = _FORMS[name]
    given = _by_name(call, name, form)
    if not isinstance(given.get("DATA"), exp.Tuple):
        raise refused(
            call, f"the first argument of {name} must be a table, as in {name}(TABLE bids, DESCRIPTOR(ts), …)"
        )
    relation = table(given["DATA"].expressions[0])
    keys = given["DATA"].expressions[1:]
    if keys and name != "SESSION":
        raise refused(call, "PARTITION BY belongs to SESSION alone; name the keys in GROUP BY")
    if not all(isinstance(key, exp.Column) for key in keys):
        raise refused(call, "PARTITION BY takes only columns here; compute other keys in a query in FROM")
    descriptor = given.get("TIMECOL")
    if descriptor is None or not is_call(descriptor, "DESCRIPTOR") or len(descriptor.expressions) != 1:
        raise refused(call, f"the second argument of {name} must be the column of event time: write DESCRIPTOR(ts)")
    check_time(descriptor.expressions[0], relation)
    durations = [_duration(given[each], translate) for each in form.arguments if each in given]
    with errors_at(call):
        spec = form.make(*durations)
    return with_windows(relation, spec, tuple(relation.find(key).inner for key in keys))


def with_windows(relation: Relation, spec: Spec, sessions_by: tuple[str, ...] = ()) -> Relation:
    """Returns the relation with windows to which its rows are not assigned yet, and with the names of the window
    bounds.
    """
    if relation.windows is not None:
        raise ConfigurationError(
            "SQL: the rows are already in windows, and the query has not grouped them by these: GROUP BY the bounds "
            "of the inner windows first"
        )
    table = relation.names[0].table if relation.names else None
    bounds = [Name(table, name, name, bound=True) for name in (WINDOW_START, WINDOW_END, WINDOW_TIME)]
    kept = [each for each in relation.names if each.name not in (WINDOW_START, WINDOW_END, WINDOW_TIME)]
    return replace(relation, names=(*kept, *bounds), windows=spec, results=None, sessions_by=sessions_by)


def check_time(node: exp.Expr, relation: Relation) -> None:
    """Raises ConfigurationError if a node is not the event-time column of the stream."""
    if not isinstance(node, exp.Column):
        raise refused(node, "DESCRIPTOR takes the column of event time, not an expression: name the column")
    found, time = relation.find(node), relation.stream.timestamp
    if found.inner == time or (isinstance(time, WindowEnd) and found.name == WINDOW_TIME):
        return
    if time is None:
        raise refused(
            node,
            "the stream has no event time; name its column with timestamp= at the source, or with assign_timestamps",
        )
    shown = WINDOW_TIME if isinstance(time, WindowEnd) else time
    raise refused(node, f"the event time of this stream is {shown!r}; choose another column with assign_timestamps")


def spark_window(node: exp.Expr, relation: Relation) -> Spec:
    """Returns the window specification for a call such as `window(ts, '10 minutes', '5 minutes')` or
    `session_window(ts, '5 minutes')`.
    """
    name, (time, *rest) = str(node.name).lower(), node.expressions or [None]
    session = name == "session_window"
    if time is None or not 1 <= len(rest) <= (1 if session else 3):
        shape = "session_window(ts, gap)" if session else "window(ts, size [, slide [, start]])"
        raise refused(node, f"{name} is called with {len(node.expressions)} arguments: write {shape}")
    check_time(time, relation)
    durations = [_spark_duration(each) for each in rest]
    with errors_at(node):
        if session:
            return Session(durations[0])
        size = durations[0]
        slide = durations[1] if len(durations) > 1 else size
        offset = durations[2] if len(durations) > 2 else 0
        if slide == size:
            return Tumbling(size, offset)
        return Sliding(size, slide, offset)


def grid_of(spec: Spec) -> Tumbling | None:
    """Returns tumbling windows that group the results of `spec`: each contains the end of exactly one window of `spec`.

    None for sessions.
    """
    match spec:
        case Tumbling():
            return spec
        case Sliding():
            return Tumbling(spec.slide_ms, (spec.offset_ms + spec.size_ms) % spec.slide_ms)
        case Cumulating():
            return Tumbling(spec.step_ms)
    return None


def _by_name(call: exp.Expr, name: str, form: _Form) -> dict[str, exp.Expr]:
    """Returns the arguments of a window function by name, whether the query gives them by name or by position."""
    order, found = (*_BEFORE, *form.arguments), dict[str, exp.Expr]()
    for place, each in enumerate(call.expressions):
        if isinstance(each, exp.PropertyEQ):
            label, value = each.this.name.upper(), each.expression
        elif place < len(order):
            label, value = order[place], each
        else:
            raise refused(
                call, f"{name} takes {', '.join(order)}, not {len(call.expressions)} arguments: write each once"
            )
        if label not in order or label in found:
            raise refused(call, f"{name} takes {', '.join(order)}, each once, and not {label}")
        found[label] = value
    missing = [each for each in form.arguments[: form.least] if each not in found]
    if missing:
        raise refused(call, f"{name} takes {', '.join(order)}; {', '.join(missing)} is missing")
    return found


def _duration(node: exp.Expr, translate: Translate) -> int:
    value = translate(node).value
    if not isinstance(value, Interval):
        raise refused(node, "an interval is needed here: write INTERVAL '10' SECONDS")
    if value.months:
        raise refused(node, "windows of months have no fixed length; use days")
    return value.ms


def _spark_duration(node: exp.Expr) -> int:
    """Returns the length of a duration in Spark's form, such as '10 seconds' or '1 hour', in ms."""
    if not isinstance(node, exp.Literal) or not node.is_string:
        raise refused(node, "a duration as a text is needed here: write '10 seconds'")
    words = str(node.this).lower().removeprefix("interval ").split()
    text = " ".join(words)
    short = {"millisecond": "ms", "second": "s", "minute": "min", "hour": "h", "day": "d", "week": "w"}
    if len(words) == 2 and words[1].removesuffix("s") in short and words[0].isdigit():
        number, unit = int(words[0]), short[words[1].removesuffix("s")]
        text = f"{number * 7}d" if unit == "w" else f"{number}{unit}"
    with errors_at(node):
        return parse_duration_ms(text, setting="a window")


def names_bound(node: exp.Expr, relation: Relation) -> bool:
    """Returns whether a condition refers to a bound of windows that are not applied yet."""
    return relation.windows is not None and any(_is_bound(each, relation) for each in columns_in(node))


def with_bound_conditions(relation: Relation, conditions: list[exp.Expr]) -> tuple[Relation, list[exp.Expr]]:
    """Moves the conditions on window bounds into the relation. Returns the new relation, and the other conditions.

    Raises ConfigurationError for a condition that refers to a window bound and to another column, because a window has
    no single row.
    """
    conditions_on_bounds = [each for each in conditions if names_bound(each, relation)]
    for node in conditions_on_bounds:
        for each in columns_in(node):
            if not _is_bound(each, relation):
                raise refused(
                    node,
                    f"a condition on the bounds of a window holds for all of its rows, but {each.name!r} belongs to "
                    "one row: put the condition into HAVING if it is a key, else compute the condition in a query in "
                    "FROM",
                )
    if not conditions_on_bounds:
        return relation, conditions
    waiting = tuple(BoundCondition(node, relation.names) for node in conditions_on_bounds)
    return replace(relation, bound_conditions=(*relation.bound_conditions, *waiting)), [
        each for each in conditions if each not in conditions_on_bounds
    ]


def filtered_by_bounds(made: Relation, conditions_on_bounds: tuple[BoundCondition, ...], steps: Steps) -> Relation:
    """Returns the results of windows whose bounds satisfy the conditions."""
    if not conditions_on_bounds:
        return made
    conditions = [_translated(each, made) for each in conditions_on_bounds]
    with errors_at(conditions_on_bounds[0].node):
        return made.with_stream(steps.filtered(made.stream, all_of(conditions)))


def _translated(condition: BoundCondition, made: Relation) -> pl.Expr:
    within = replace(made, names=condition.names)

    def bound(node: exp.Column) -> Typed:
        inner = within.find(node).inner
        if inner == WINDOW_TIME:
            return moved(node, made.of_inner(WINDOW_END), Interval(0, -1))
        return made.of_inner(inner)

    return Expressions(bound).condition(condition.node)


def _is_bound(node: exp.Column, relation: Relation) -> bool:
    return relation.root(node) is node and relation.find(node).bound
