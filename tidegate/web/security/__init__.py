"""Who may come in: tokens, rights, limits of requests, and the login of a browser."""
