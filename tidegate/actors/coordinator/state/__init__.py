"""What a coordinator remembers: the fold over its event log, and what it counts.

The modules beside and above change it; a coordinator that takes over replays the log, and has the same.
"""
