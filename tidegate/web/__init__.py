"""Jobs by HTTP: what is shown (`model`), who asks the jobs (`watch`), who may come in (`security`), and the server."""
