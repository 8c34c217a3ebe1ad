"""Drives the two machines in every runtime: carries out their instructions, and tells them what came of it.

A host calls `machine.handle(event)`, and does I/O by its effects. What differs between runtimes it asks of a port
(`ports.py`): how to send a message, to set a timer, to start work on another thread.
"""
