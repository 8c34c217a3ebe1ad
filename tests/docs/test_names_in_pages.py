"""Names, arguments and defaults that pages give are those of the code: readers type what they read."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from side_by_side import lines

import tidegate as tg
from tidegate import recovery
from tidegate.api.config.config_file import KNOWN_KEYS
from tidegate.api.config.restrictions import FIXED, REFUSED
from tidegate.api.config.settings_table import rows
from tidegate.api.tables.output_tables import HISTORY_DEFAULT
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
PUBLIC = re.compile(r"\btg\.([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")
KEY_ROOTS = (
    "execution|jobmanager|state|taskmanager|web|high-availability|heartbeat|task|slotmanager|slot|pipeline|rest|log"
)
KEY = re.compile(rf"`((?:{KEY_ROOTS})(?:\.[a-z][\w-]*)+)`")
NO_KEYS = {"web.dashboard"}
GIVEN_DEFAULT = re.compile(r"`(\w+)=([^`=]+)`(?:,| \(?)(?:the )?default\b")
SPOKEN_DEFAULT = re.compile(r"`([a-z_.-]+)`(?: is|,)?,? \(?(\w+ [a-zA-Z]+) by default")
NUMBERS = {"ten": "10", "a": "1", "one": "1", "five": "5"}
UNITS = {"minutes": "min", "minute": "min", "seconds": "s", "week": "d", "MB": "mb", "KB": "kb"}
CONTEXTS = tuple(getattr(tg, name) for name in dir(tg) if name.endswith("Context"))
RECEIVERS: dict[str, tuple[object, ...]] = {
    "stream": (tg.Stream, tg.KeyedStream, tg.WindowedStream),
    "keyed": (tg.KeyedStream,),
    "windowed": (tg.WindowedStream,),
    "env": (tg.StreamEnvironment,),
    "job": (tg.Job,),
    "table": (tg.OutputTable, tg.CollectedRows),
    "rows": (tg.OutputTable, tg.CollectedRows),
    "recovery": (recovery,),
    "context": CONTEXTS,
}
"""What names in pages stand for."""
OF_OTHERS = {line.theirs for line in lines()}
"""What `coming-from.md` shows of other engines."""


def calls() -> dict[str, list[Callable[..., object]]]:
    """Everything public that can be called, by its last name."""
    found: dict[str, list[Callable[..., object]]] = {}
    for name in dir(tg):
        value = getattr(tg, name)
        if not callable(value) or name.startswith("_"):
            continue
        found.setdefault(name, []).append(value)
        for method in dir(value) if inspect.isclass(value) else ():
            if not method.startswith("_") and callable(getattr(value, method)):
                found.setdefault(method, []).append(getattr(value, method))
    for name in recovery.__all__:
        found.setdefault(name, []).append(getattr(recovery, name))
    return found


CALLS = calls()


def inline(page: Path) -> Iterator[str]:
    """What a page has in backticks, without its blocks."""
    yield from (text for text in INLINE.findall(FENCE.sub("", page.read_text())) if text not in OF_OTHERS)


def parameters(call: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters of a function or class; none where they cannot be known."""
    try:
        return dict(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return {}


def unknown_arguments(text: str) -> Iterator[str]:
    """Keywords of a call in backticks that nothing public of that name takes."""
    try:
        tree = ast.parse(text.replace("…", "..."), mode="eval")
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        known = [parameters(call) for call in CALLS.get(name, ())]
        if not known or any(p.kind is p.VAR_KEYWORD for each in known for p in each.values()):
            continue
        for keyword in node.keywords:
            if keyword.arg is not None and not any(keyword.arg in each for each in known):
                yield f"{name}({keyword.arg}=)"


def missing_methods(text: str) -> Iterator[str]:
    """Methods in backticks that what they are called on does not have."""
    for receiver, method in re.findall(rf"(?<![\w.])({'|'.join(RECEIVERS)})\.([a-z_]\w*)\(", text):
        if not any(hasattr(each, method) for each in RECEIVERS[receiver]):
            yield f"{receiver}.{method}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_a_page_exist(page: Path) -> None:
    """Public names with their members, methods of what has a usual name, arguments of calls, keys of settings."""
    found = []
    for name, member in PUBLIC.findall(page.read_text()):
        public = getattr(tg, name, None)
        if public is None or (member and not hasattr(public, member)):
            found.append(f"tg.{name}.{member}")
    for text in inline(page):
        found += [*missing_methods(text), *unknown_arguments(text)]
    known = {*KNOWN_KEYS, *FIXED, *REFUSED, *NO_KEYS}
    found += [key for key in KEY.findall(page.read_text()) if not is_key(key, known)]
    assert found == []


def is_key(key: str, known: set[str]) -> bool:
    """Whether a key can be given, or is refused with a reason."""
    return key in known or any(each[-1] in ".-" and key.startswith(each) for each in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_defaults_of_a_page_are_those_of_the_code(page: Path) -> None:
    """Where a page says "`name=value`, the default", or of a setting how much it is by default."""
    text, found = FENCE.sub("", page.read_text()), []
    for name, value in GIVEN_DEFAULT.findall(text):
        if ast.literal_eval(value) not in defaults_of(name):
            found.append(f"{name}={value}")
    for name, value in SPOKEN_DEFAULT.findall(text):
        if (expected := setting_default(name)) is not None and amount(value) != amount(expected):
            found.append(f"{name}: {value}, and it is {expected}")
    assert found == []


def defaults_of(name: str) -> list[object]:
    """What parameters of a name are if they are not given, and settings."""
    known = [each[name].default for found in CALLS.values() for each in map(parameters, found) if name in each]
    return [*known, *(setting.default for setting in rows() if setting.name == name)]


def setting_default(name: str) -> str | None:
    """The default of a setting, as its page has it; None where there is no such setting."""
    return next((row.default for row in rows() if name in (row.name, *row.keys)), None)


def amount(text: str) -> int:
    """A duration or size, in digits or in words."""
    words = text.replace("`", "").split()
    number = NUMBERS.get(words[0], words[0])
    unit = UNITS.get(words[1], words[1]) if len(words) > 1 else ""
    value = f"{int(number) * 7}d" if words[-1] == "week" else f"{number}{unit}"
    try:
        return parse_duration_ms(value, setting="default")
    except ConfigurationError:
        return parse_size_bytes(value, setting="default")


def section(page: str, heading: str) -> str:
    """What stands under a heading of a page."""
    return re.split(r"^## ", (ROOT / "docs" / page).read_text().split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]


def cells(text: str, column: int = 0) -> list[str]:
    """A column of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [re.split(r"(?<!\\)\|", line)[column + 1] for line in lines[2:]]


def aggregates() -> set[str]:
    """The aggregate functions that are exported."""
    made: Any
    functions = (getattr(tg, name) for name in dir(tg) if name[0].islower())
    made = [f for f in functions if inspect.isfunction(f)]
    return {f.__name__ for f in made if inspect.get_annotations(f, eval_str=False).get("return") == Aggregate.__name__}


def test_the_page_of_aggregates_has_all_of_them() -> None:
    """Each in the table of what there is, no other, and each with what is kept of it."""
    listed = {
        name for cell in cells(section("aggregates.md", "What there is")) for name in re.findall(r"`(\w+)[(`]", cell)
    }
    assert listed == aggregates()
    kept = " ".join(cells(section("aggregates.md", "What is kept")))
    prefixes = [name.rstrip("…") for name in re.findall(r"`([\w…]+)`", kept)]
    derived = {"bool_and", "bool_or"}
    assert {name for name in aggregates() - derived if not name.startswith(tuple(prefixes))} == set()


def test_the_page_of_state_has_all_kinds() -> None:
    """Every state that is exported, with the methods of contexts that give it, and every backend with the default."""
    text = section("state.md", "Kinds of state")
    states = {
        name for name in dir(tg) if name.endswith("State") and name not in ("BroadcastState", "OperatorListState")
    }
    assert set(re.findall(r"`tg\.(\w+State)`", text)) == states
    backend = next(row for row in rows() if row.name == "backend")
    table = section("state.md", "Choosing a backend").split("\n\nPrograms")[0]
    listed = [re.findall(r"`(\w+)`", cell)[0] for cell in cells(table)]
    assert [name for name in listed if name in backend.kind] == listed
    assert [name for name, cell in zip(listed, cells(table), strict=True) if "default" in cell] == [
        backend.default.strip("`")
    ]


def test_the_page_of_tables_has_the_default_history() -> None:
    """In the call and in words."""
    assert HISTORY_DEFAULT == "7d"
    assert 'history="7d")` sets for how long' in (ROOT / "docs" / "tables.md").read_text()
    assert inspect.signature(tg.Stream.to_table).parameters["history"].default == HISTORY_DEFAULT


def test_what_is_not_there_is_recognised() -> None:
    """The rules bite."""
    assert list(missing_methods("stream.attic(1)")) == ["stream.attic"]
    assert list(unknown_arguments('stream.to_table(…, attic="7d")')) == ["to_table(attic=)"]
    assert not is_key("execution.attic", {"execution.interval", "state.backend."})
    assert amount("ten minutes") == amount("10min") == 600_000
    assert amount("20 KB") == amount("20kb") == 20 * 1024
