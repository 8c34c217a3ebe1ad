"""Works on what is stored, without a job: the part of `tidegate.recovery` that needs more than storage.

That is the meaning of events, of keys and of Spark's types, for which it imports the rooms below. Users find these
names in `tidegate.recovery`.
"""
