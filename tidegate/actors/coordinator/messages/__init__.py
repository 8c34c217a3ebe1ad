"""What goes into the coordinator machine, and what comes out: its events and its instructions.

Events are written to the event log, so they are wire types. `causes.py` and `words.py` explain a log to people.
"""
