"""One module for each peer: its worker, and who enqueues for it, at the best settings known.

A module is run as `python -m benchmarks.service.peers.NAME ROLE`; where a peer brings a command of
its own for the worker, that imports the module instead.
"""
