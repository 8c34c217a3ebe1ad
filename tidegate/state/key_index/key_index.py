"""`KeyIndex` maps the key columns of a batch to slots, with the kind of index that fits their types.

One fixed-width column uses `IntIndex`, two use `IntPairIndex`. One string column uses `BytesIndex`, directly with
Arrow's buffers. All other combinations are first encoded into rows of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.state.kernels.columns import Strings, Words, key_forms
from tidegate.state.kernels.row_encoding import encode_rows
from tidegate.state.key_index.bytes_index import BytesIndex, hash_keys
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.key_index.int_index import IntIndex
from tidegate.state.key_index.int_pair_index import IntPairIndex


class KeyIndex:
    """Maps keys (rows of the named columns) to slots 0, 1, 2, … in the order in which keys first appear.

    Null is a key like any other. All NaN are one key, and so are 0.0 and -0.0. The types of the columns must not change
    between batches.
    """

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: tuple[str, ...]) -> None:
        assert columns, "an index needs at least one key column"
        self._columns = columns
        self._index: IntIndex | IntPairIndex | BytesIndex | None = None

    @property
    def size(self) -> int:
        """Returns the number of keys, which is also the next free slot."""
        return 0 if self._index is None else self._index.size

    @property
    def size_bytes(self) -> int:
        return 0 if self._index is None else self._index.size_bytes

    def upsert(self, batch: pa.RecordBatch) -> Upserted:
        """Returns the slots of the keys of a batch. New keys get the next free slots.

        Raises ConfigurationError if a column is missing, or has a type that cannot be a key.
        """
        return self.upsert_forms(key_forms(batch, self._columns), batch.num_rows)

    def upsert_forms(self, forms: Sequence[Words | Strings], rows: int) -> Upserted:
        """Returns the slots of keys like `upsert`, for key columns in canonical form (see `key_form`)."""
        keys = _joined(forms, rows)
        if isinstance(keys, Words):
            return self._int_index().upsert(keys.words, keys.valid)
        if isinstance(keys, tuple):
            return self._pair_index().upsert(*keys)
        return self._bytes_index().upsert(keys, hash_keys(keys))

    def fill(self, batch: pa.RecordBatch, keys_to_come: int = 0) -> bool:
        """Assigns the next slots to the keys of a batch, in their order. For many keys it is much faster than `upsert`.

        Reserves memory for `keys_to_come` keys of later calls. Returns False if a key occurs twice or already existed.
        Then the index must not be used any more. Raises the same errors as `upsert`.
        """
        keys = _joined(key_forms(batch, self._columns), batch.num_rows)
        if isinstance(keys, Words):
            return self._int_index().fill(keys.words, keys.valid, keys_to_come)
        if isinstance(keys, tuple):
            return self._pair_index().fill(*keys, keys_to_come)
        return self._bytes_index().fill(keys, hash_keys(keys), keys_to_come)

    def _int_index(self) -> IntIndex:
        if self._index is None:
            self._index = IntIndex()
        assert isinstance(self._index, IntIndex), f"type of key column {self._columns} has changed"
        return self._index

    def _pair_index(self) -> IntPairIndex:
        if self._index is None:
            self._index = IntPairIndex()
        assert isinstance(self._index, IntPairIndex), f"type of key columns {self._columns} has changed"
        return self._index

    def _bytes_index(self) -> BytesIndex:
        if self._index is None:
            self._index = BytesIndex()
        assert isinstance(self._index, BytesIndex), f"type of key column {self._columns} has changed"
        return self._index


def _joined(forms: Sequence[Words | Strings], rows: int) -> Words | tuple[Words, Words] | Strings:
    """Combines key columns for an index: into one column of words, two columns of words, or one column of byte
    strings.
    """
    match forms:
        case [one]:
            return one
        case [Words() as first, Words() as second]:
            return first, second
        case _:
            return encode_rows(forms, rows)
