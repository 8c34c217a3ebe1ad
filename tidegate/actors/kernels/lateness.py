"""Whether rows lie behind the watermark that the rows before them have made."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.actors.kernels.jit import kernel


@kernel
def any_behind(times: NDArray[np.int64], movers: NDArray[np.int64], newest: int, delay: int, least: int) -> bool:
    """Whether the time of a row is no later than the watermark before it.

    A watermark is the greatest of `newest` and of the `movers` of the rows before, less `delay`; `least` at first.
    Rows whose time is `least` have none.
    """
    newest = max(newest, least + delay)
    for row in range(times.shape[0]):
        if times[row] <= newest - delay and times[row] != least:
            return True
        newest = max(newest, movers[row])
    return False
