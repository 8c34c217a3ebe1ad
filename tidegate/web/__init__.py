"""The page and the REST API of jobs: what they show (`model`), who asks the jobs (`watch`), and the server."""
