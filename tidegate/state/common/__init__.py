"""The interface of all state backends, their options, and columns that are stored in pages."""
