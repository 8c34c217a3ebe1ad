"""Ray Data beside tidegate: datasets as replayable sources, and tables as datasets.

Modules are imported where they are used: both need Ray Data, which not every program has.
"""
