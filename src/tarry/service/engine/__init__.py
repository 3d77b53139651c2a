"""What makes tasks happen: ingest, claims, attempts, lanes, maintenance."""
