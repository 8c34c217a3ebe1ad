"""`StateMeaning`: what the state of an operator means, as it is stored beside the state in `_metadata`.

The names and types of stored columns do not tell a sum from a maximum. So each stateful step describes what makes its
state: its functions, windows, keys, order, time to live. A restored program is compared with that before anything runs
(`tidegate/actors/restore/meaning_checks.py`). Rules:

- A description is made of values that the program was given, and of expressions by their structure. It never depends on
  how a library displays them.
- Two descriptions are comparable only if their versions are equal.
- Functions of users have no comparable meaning: a description names the step that calls them, and the states of the
  step by name and type.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tidegate.storage.codec import wire

MEANING_VERSION = 1


@wire
@dataclass(frozen=True, slots=True)
class MeaningPart:
    """One fact: its role (`window`, `keys`, `aggregate`), the name that the program gave it, and its canonical text.

    `name` is empty where a role has one part only. Aggregates are named by their output columns.
    """

    role: str
    name: str
    text: str

    @property
    def label(self) -> str:
        """The fact as errors show it."""
        return f"{self.role} {self.name}={self.text}" if self.name else f"{self.role} {self.text}"


@wire
@dataclass(frozen=True, slots=True)
class MeaningColumns:
    """The types of the stored columns that belong to one part, as a serialised Arrow schema.

    `role` and `name` are those of the part, or `rows` and a side for stored input rows.
    """

    role: str
    name: str
    schema: bytes

    @staticmethod
    def of(role: str, name: str, schema: pa.Schema) -> MeaningColumns:
        """The columns of an Arrow schema; its metadata is dropped."""
        plain = pa.schema([field.remove_metadata() for field in schema])
        return MeaningColumns(role, name, plain.serialize().to_pybytes())

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns as an Arrow schema."""
        return pa.ipc.read_schema(pa.py_buffer(self.schema))


@wire
@dataclass(frozen=True, slots=True)
class StateMeaning:
    """What the state of one operator means.

    `kind`: the step that makes the state, such as `window aggregate`. `evolves`: roles whose parts may be added and
    removed between two programs. `columns` is empty for what is known only when the job runs.
    """

    kind: str
    parts: tuple[MeaningPart, ...] = ()
    columns: tuple[MeaningColumns, ...] = ()
    evolves: tuple[str, ...] = ()
    version: int = MEANING_VERSION
