"""What each process of a job on Ray has: a mailbox, calls that are not lost, its end."""
