"""`KeyIndex`: maps the key columns of a batch to slots, with the index that suits their types.

The key space of a state backend has one. One fixed-width column goes to `WordIndex`, two to `PairIndex`. One string
column goes to `BytesIndex`, straight from Arrow's buffers. Other columns are first encoded into rows of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.state.kernels.columns import Strings, Words, key_forms
from tidegate.state.kernels.row_encoding import encode_rows
from tidegate.state.key_index.bytes_index import BytesIndex
from tidegate.state.key_index.bytes_words import hash_keys
from tidegate.state.key_index.entries import Upserted
from tidegate.state.key_index.pair_index import PairIndex
from tidegate.state.key_index.word_index import WordIndex


class KeyIndex:
    """Keys (rows of the named columns) → slots 0, 1, 2, … in the order in which keys first appear.

    A null is a key like any other. All NaN are one key, and so are 0.0 and -0.0. The types of the columns must not
    change between batches.
    """

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: tuple[str, ...]) -> None:
        assert columns, "an index needs at least one key column"
        self._columns = columns
        self._index: WordIndex | PairIndex | BytesIndex | None = None

    @property
    def size(self) -> int:
        """How many keys there are. Also the next free slot."""
        return 0 if self._index is None else self._index.size

    @property
    def size_bytes(self) -> int:
        """Bytes of the index."""
        return 0 if self._index is None else self._index.size_bytes

    def upsert(self, batch: pa.RecordBatch) -> Upserted:
        """Slots of the keys of a batch. New keys get the next free slots.

        Raises ConfigurationError if a column is missing, or has a type that cannot be a key.
        """
        return self.upsert_forms(key_forms(batch, self._columns), batch.num_rows)

    def upsert_forms(self, forms: Sequence[Words | Strings], rows: int) -> Upserted:
        """The same for columns of keys in their canonical forms."""
        keys = _joined(forms, rows)
        if isinstance(keys, Words):
            return self._of_words().upsert(keys.words, keys.valid)
        if isinstance(keys, tuple):
            return self._of_pairs().upsert(*keys)
        return self._of_bytes().upsert(keys, hash_keys(keys))

    def fill(self, batch: pa.RecordBatch, keys_to_come: int = 0) -> bool:
        """Give the next slots to the keys of a batch, in their order. Much faster than `upsert` for many keys.

        `keys_to_come` more keys will follow in later calls; room is made for them now. Returns False if a key comes
        twice or was known already; the index is then useless. Raises as `upsert`.
        """
        keys = _joined(key_forms(batch, self._columns), batch.num_rows)
        if isinstance(keys, Words):
            return self._of_words().fill(keys.words, keys.valid, keys_to_come)
        if isinstance(keys, tuple):
            return self._of_pairs().fill(*keys, keys_to_come)
        return self._of_bytes().fill(keys, hash_keys(keys), keys_to_come)

    def _of_words(self) -> WordIndex:
        if self._index is None:
            self._index = WordIndex()
        assert isinstance(self._index, WordIndex), f"type of key column {self._columns} has changed"
        return self._index

    def _of_pairs(self) -> PairIndex:
        if self._index is None:
            self._index = PairIndex()
        assert isinstance(self._index, PairIndex), f"type of key columns {self._columns} has changed"
        return self._index

    def _of_bytes(self) -> BytesIndex:
        if self._index is None:
            self._index = BytesIndex()
        assert isinstance(self._index, BytesIndex), f"type of key column {self._columns} has changed"
        return self._index


def _joined(forms: Sequence[Words | Strings], rows: int) -> Words | tuple[Words, Words] | Strings:
    """The keys as one column of words, as two of them, or as one of byte strings."""
    match forms:
        case [one]:
            return one
        case [Words() as first, Words() as second]:
            return first, second
        case _:
            return encode_rows(forms, rows)
