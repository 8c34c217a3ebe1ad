"""Random jobs for our own tests of the protocol: a seed draws a pipeline, its settings, its faults and user requests.

`scenarios.simulate_random(seed)` runs one seed. `make simulate` runs a range of seeds (`__main__.py`).
"""
