"""The commands of `tidegate`.

Each module `*_command.py` parses one command group, and `main.py` combines the groups.
"""
