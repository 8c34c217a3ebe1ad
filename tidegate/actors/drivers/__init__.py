"""Runs the machines of coordinator and tasks in every runtime: carries out their instructions, and returns the results
as events.

A driver calls `machine.handle(event)`, and does I/O through its effects. The differences between runtimes are behind a
port (`ports.py`): how to send a message, set a timer, or start work on another thread.
"""
