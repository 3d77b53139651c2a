"""One module for each peer, with its worker and its enqueuer, at the fastest settings found.

A module is run as `python -m benchmarks.service.peers.NAME ROLE`; if a peer has its own command
for workers, that command imports the module instead.
"""
