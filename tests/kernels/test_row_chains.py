"""Chains of rows of keys are those of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state.columnar.row_table import RowChains

_SLOTS, _KEYS = 40, 5
_STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, _KEYS - 1), max_size=4), st.sets(st.integers(0, _SLOTS - 1), max_size=3)),
    max_size=_SLOTS // 4,
)


@given(steps=_STEPS)
def test_chains_are_lists(steps: list[tuple[list[int], set[int]]]) -> None:
    """Rows come behind those of their key, some go, and what is left is found in order, also if a key comes twice."""
    chains = RowChains()
    chains.grow(_KEYS, _SLOTS)
    live = np.zeros(4096, dtype=np.uint8)
    flags = np.array([live.ctypes.data], dtype=np.uintp)
    lists: dict[int, list[int]] = {key: [] for key in range(_KEYS)}
    used = 0
    for keys, gone in steps:
        slots = np.arange(used, used + len(keys), dtype=np.int32)
        used += len(keys)
        live[slots] = 1
        chains.add(np.array(keys, dtype=np.int32), slots)
        for key, slot in zip(keys, slots.tolist(), strict=True):
            lists[key].append(slot)
        live[list(gone)] = 0
        lists = {key: [slot for slot in held if slot not in gone] for key, held in lists.items()}
        asked = np.array([*range(_KEYS), 2], dtype=np.int32)
        positions, found = chains.find(asked, np.arange(_KEYS, dtype=np.int32), flags)
        assert found.tolist() == [slot for key in asked.tolist() for slot in lists[key]]
        counts = [len(lists[key]) for key in asked.tolist()]
        assert positions.tolist() == np.repeat(np.arange(len(asked)), counts).tolist()
    chains.clear(np.array([1], dtype=np.int32))
    _, found = chains.find(np.arange(_KEYS, dtype=np.int32), np.arange(_KEYS, dtype=np.int32), flags)
    assert found.tolist() == [slot for key, held in lists.items() if key != 1 for slot in held]
