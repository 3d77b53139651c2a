"""The HTTP face of the service: one file per resource."""
