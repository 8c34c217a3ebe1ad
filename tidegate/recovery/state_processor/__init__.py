"""The part of `tidegate.recovery` that interprets stored events, keys and Spark types, without a running job.

It imports the packages for these. Users find its names in `tidegate.recovery`.
"""
