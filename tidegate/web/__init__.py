"""Jobs over HTTP: the shown data (`model`), the state of jobs (`watch`), access (`security`), and the server."""
