"""What the service costs, and how fast it is, beside its peers: see docs/benchmarks.md."""
