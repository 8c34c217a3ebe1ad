"""Process functions that take rows and emit none, where a test is about the step around them."""

from __future__ import annotations

from typing import Any

import tidegate as tg


class Passes(tg.ProcessFunction):
    """Takes the rows of one stream."""

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        pass


class PassesBoth(tg.CoProcessFunction):
    """Takes the rows of two streams."""

    def process1(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        pass

    def process2(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        pass
