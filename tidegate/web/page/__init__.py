"""The job page: HTML of what the model says, made here, without a build chain and without requests to elsewhere."""
