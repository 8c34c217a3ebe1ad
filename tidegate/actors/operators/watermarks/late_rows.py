"""What rows are called that come too late: windows, joins and rankings of event time count them, most give them aside.

A row is late by the watermark that has come to the operator, that of its slowest channel.
"""

from __future__ import annotations

LATE = "late"
"""The side output of late rows."""
LATE_RECORDS = "numLateRecordsDropped"
"""Flink's name for how many there were."""
