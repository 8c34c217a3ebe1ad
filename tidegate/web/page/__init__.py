"""The job page: HTML from the model, rendered on the server.

It needs no build tools, and loads nothing from other servers.
"""
