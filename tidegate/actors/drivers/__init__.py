"""Drives the two machines in every runtime: carries out their instructions, and feeds the results back as events. A
driver calls `machine.handle(event)`, and does I/O through its effects. What differs between runtimes is behind a port
(`ports.py`): how to send a message, set a timer, or start work on another thread.
"""
