"""From a program to a running job: its names and folders, its tables, where it starts."""
