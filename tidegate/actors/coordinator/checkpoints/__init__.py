"""The life of one checkpoint: triggered, acknowledged, completed, committed, and in the end subsumed or given up.

`checkpoint_keeper.py` takes it up to the last acknowledgement, `completion.py` from there to `_metadata`, and
`sink_commits.py` makes its output visible. `abandonment.py` gives up, `discards.py` deletes, and `fallback.py` passes
over what is damaged. The coordinator machine calls them with its events.
"""
