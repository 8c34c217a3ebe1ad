"""`merged_sessions`: which stretches of time are one session. `SessionWindows` and windows with functions ask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.operators.windows.window_specs import Times
from tidegate.state.kernels.jit import kernel


def merged_sessions(
    codes: NDArray[np.int64], starts: Times, ends: Times
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[Times, Times]]:
    """Merge stretches of time of the same key that overlap or touch.

    Returns the number of the session that each belongs to, in the order of keys and starts; for each session a member,
    and its bounds.
    """
    order = np.lexsort((starts, codes))
    numbers = np.empty(len(codes), dtype=np.int64)
    firsts, begins, stops = (np.empty(len(codes), dtype=np.int64) for _ in range(3))
    count = _merge(order, codes, starts, ends, numbers, firsts, begins, stops)
    return numbers, firsts[:count], (begins[:count], stops[:count])


@kernel
def _merge(
    order: NDArray[np.int64],
    codes: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    numbers: NDArray[np.int64],
    firsts: NDArray[np.int64],
    begins: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> int:
    count = 0
    for i in range(order.shape[0]):
        row = order[i]
        if count == 0 or codes[row] != codes[firsts[count - 1]] or starts[row] > stops[count - 1]:
            firsts[count] = row
            begins[count] = starts[row]
            stops[count] = ends[row]
            count += 1
        elif ends[row] > stops[count - 1]:
            stops[count - 1] = ends[row]
        numbers[row] = count - 1
    return count
