"""Cost and speed of the service, compared with its peers: see docs/benchmarks-service.md."""
