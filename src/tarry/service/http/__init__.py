"""The HTTP server: uvicorn with limits per connection and a fast path for new tasks."""
