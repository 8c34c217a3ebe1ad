"""Tools to test user programs: one process function driven step by step, or a whole pipeline under seeded faults.

`ProcessHarness` drives one process function with rows, watermarks and a clock. `simulate` runs a pipeline in virtual
time while processes crash and storage fails, and compares its rows with the rows of a run without faults. `check_sink`
and `check_committing_sink` check whether a user's sink fulfills its contract, `check_source` checks a source.
"""

from tidegate.testing.process_harness import HarnessSnapshot, HarnessTimer, ProcessHarness
from tidegate.testing.report import SimulationReport
from tidegate.testing.runtime.run import Protocol
from tidegate.testing.simulated import SimulatedPipeline, simulate
from tidegate.testing.sink_contract import check_committing_sink, check_sink
from tidegate.testing.source_contract import check_source
from tidegate.testing.world.faults import Faults

__all__ = [
    "Faults",
    "HarnessSnapshot",
    "HarnessTimer",
    "ProcessHarness",
    "Protocol",
    "SimulatedPipeline",
    "SimulationReport",
    "check_committing_sink",
    "check_sink",
    "check_source",
    "simulate",
]
