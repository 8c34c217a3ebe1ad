"""The published checks of sources, and their parts."""

from __future__ import annotations

from tidegate.testing.source_contract import Place, all_splits, check_source, read_split, rows_of

__all__ = ["Place", "all_splits", "check_source", "read_split", "rows_of"]
