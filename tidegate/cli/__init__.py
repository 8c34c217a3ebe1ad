"""The commands of `tidegate`: each group parses in a module `*_command.py`; `tidegate/cli/main.py` puts them
together."""
