"""The REST API: Flink's paths, answered out of the model (`reading`), and what changes a job (`changing`)."""
