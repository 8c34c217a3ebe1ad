"""Figures that others have published for Nexmark, in thousand events a second and core, and what is aimed at here.

Their machines differ, and so do generators: a ratio of two says which is larger, not by how much on one machine.
"""

from __future__ import annotations

FLINK = {"q0": 379, "q4": 28, "q5": 75, "q7": 23, "q8": 162, "q9": 14, "q20": 18}
FELDERA = {"q0": 436, "q4": 265, "q5": 412, "q7": 196, "q8": 415, "q9": 57, "q20": 85}
AIM = {"q0": 3_000, "q4": 1_000, "q5": 2_000, "q7": 1_500, "q8": 2_000, "q9": 300, "q20": 500}
