"""The HTTP server: uvicorn with limits for each request, and a fast path for new tasks."""
