"""State backends: store the keyed state of operators while a job runs."""
