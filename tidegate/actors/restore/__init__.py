"""From a checkpoint to what each task of a job starts with."""
