"""Turns a program into a running job: its name and folders, its checks, its tables, and the checkpoint from which it
starts.
"""
