"""What watches a simulated job from outside, and which invariants it holds the job to.

`watch.py` sees what happens, and hands it on: to `invariants.py`, to the oracles of `decisions/` and those of `files/`.
"""
