"""How one attempt reaches its target: HTTP, gRPC, the check of addresses, signatures."""
