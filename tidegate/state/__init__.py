"""State backends: hold the keyed state of operators while a job runs."""
