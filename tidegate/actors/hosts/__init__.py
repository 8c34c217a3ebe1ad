"""What drives the machines in every runtime, and does the I/O that they ask for."""
