"""The contract of all state backends, their options, and columns in pages."""
