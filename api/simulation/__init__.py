"""What `tidegate.testing` and `tidegate simulate` are made of: pipelines in a simulated world, drawn or the user's own.

The world itself, with its faults and its oracle, is `tidegate.actors.simulation`.
"""
