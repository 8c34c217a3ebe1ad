"""Rows of one batch are combined by key, and by slice of a window, before they are sent to the owner of the key."""
