"""The API reference at `/docs`: Swagger UI shows the OpenAPI document."""
