"""The Python client of the retry service: pure requests, thin sync and async drivers."""

from tarry.client.asynchronous import AsyncClient
from tarry.client.sync import Client

__all__ = ["AsyncClient", "Client"]
