"""What a coordinator remembers: the fold over its event log, and what it counts.

The modules of the other folders change it. A coordinator that takes over replays the log and gets the same state.
"""
