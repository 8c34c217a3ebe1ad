"""The border of the coordinator's machine: the events that it is told, and the instructions that it gives.

Events are written to the event log, so they are wire types. `causes.py` and `words.py` explain a log to people.
"""
