"""Adapters that add retries to HTTP and gRPC clients, and one for ASGI servers.

There is one module or package for each library. They do not import each other; the package `http`
has the code that the clients share.
"""
