"""The part of `tidegate.recovery` that interprets stored events, keys and Spark types. It needs no running job.

It imports the packages for these. Users import its names from `tidegate.recovery`.
"""
