"""Works on what rests in storage, without a job: what `tidegate.recovery` offers beyond storage alone.

It needs the rooms below for the meaning of things: of events, of keys, of Spark's types. Users find these names in
`tidegate.recovery`.
"""
