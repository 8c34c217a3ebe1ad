"""What random programs of windows take for timely, beside the windows that hold a row."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.actors.operators.windows.window_specs import Cumulating, Sliding, Tumbling
from tidegate.simulation.pipelines.window_topologies import PROGRAMS, Program, windows_of


@pytest.mark.parametrize(
    "program", [each for each in PROGRAMS if isinstance(each.spec, Tumbling | Sliding | Cumulating)], ids=repr
)
def test_a_row_is_over_when_the_first_of_its_windows_has_ended(program: Program) -> None:
    """Also where the slide does not divide the size, so that windows end between the starts of others."""
    assert isinstance(program.spec, Tumbling | Sliding | Cumulating)
    times = np.arange(-100, 200, dtype=np.int64)
    first = [min(end for _, end in windows_of(program.spec, int(time))) for time in times]
    assert program.over_ms(times).tolist() == first
