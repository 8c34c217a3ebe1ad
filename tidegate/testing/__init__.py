"""Tests of programs: a process function alone, driven by hand, and whole pipelines under seeded faults.

`ProcessHarness` drives one process function with rows, watermarks and a clock. `simulate` runs a pipeline of yours in
virtual time while processes crash and storage fails, and compares its rows with those of an undisturbed run.
`simulate_random(seed)` needs no pipeline: the seed draws the topology, the configuration, the faults and what users do.
"""

from tidegate.testing.process_harness import HarnessSnapshot, HarnessTimer, ProcessHarness
from tidegate.testing.report import SimulationReport
from tidegate.testing.runtime.run import Protocol
from tidegate.testing.scenarios import simulate_random
from tidegate.testing.simulated import SimulatedPipeline, simulate
from tidegate.testing.world.faults import Faults

__all__ = [
    "Faults",
    "HarnessSnapshot",
    "HarnessTimer",
    "ProcessHarness",
    "Protocol",
    "SimulatedPipeline",
    "SimulationReport",
    "simulate",
    "simulate_random",
]
