"""What drives the machines: their hosts, the I/O they ask for, and the runtimes that offer it."""
