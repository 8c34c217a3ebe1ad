"""What every backend has: its contract, its options, columns in pages."""
