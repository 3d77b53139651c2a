"""tarry inside HTTP and gRPC clients, one file for each; they know nothing of each other."""
