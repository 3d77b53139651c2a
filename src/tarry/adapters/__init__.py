"""Adapters that add retries to HTTP and gRPC clients, and one for ASGI servers.

One module for each library. They do not import each other; `http` is the code they share.
"""
