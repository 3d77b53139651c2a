"""How one attempt reaches its target: HTTP, gRPC, the guard of addresses, signatures."""
