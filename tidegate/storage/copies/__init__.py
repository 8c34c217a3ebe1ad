"""Copies on a task's own node: written beside the storage, read before it, never trusted."""
