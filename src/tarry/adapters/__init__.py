"""Adapters that add retries to HTTP and gRPC clients, and one for ASGI servers.

There is one module for each library. The modules do not import each other; `http` has the code that
they share.
"""
