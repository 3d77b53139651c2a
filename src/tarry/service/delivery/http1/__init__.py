"""The HTTP/1.1 client that makes HTTP deliveries."""
