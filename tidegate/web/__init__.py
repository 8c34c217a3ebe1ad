"""Jobs by HTTP: the data that is shown (`model`), the queries of jobs (`watch`), access (`security`), and the
server."""
