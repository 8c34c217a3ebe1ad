"""The job page: HTML from the model, rendered on the server, without a build chain and without requests elsewhere."""
