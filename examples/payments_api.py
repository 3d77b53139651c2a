"""A payment service whose requests are safe to retry, and a client that repeats requests.

Server:              uvicorn --factory examples.payments_api:make_app
Server and client:   python examples/payments_api.py

It needs `pip install tarry fastapi httpx uvicorn`. The server stores its keys in payments-keys.db
in the current directory.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

from tarry.idempotency import IdempotencyMiddleware, SqliteStore


class Payment(BaseModel):
    amount: int
    currency: str


def make_app(database: Path = Path("payments-keys.db")) -> FastAPI:
    store = SqliteStore(database)  # every worker process on the machine shares the file
    paid: list[Payment] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await store.close()

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(
        IdempotencyMiddleware,
        store=store,
        require_key=["/payments"],
        docs_url="https://example.com/docs/idempotency",
    )

    @app.post("/payments", status_code=201)
    async def pay(payment: Payment) -> dict[str, int]:
        paid.append(payment)
        return {"payment": len(paid), "amount": payment.amount}

    return app


async def run_client(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://payments") as client,
    ):

        async def post(title: str, amount: int, headers: dict[str, str]) -> None:
            body = {"amount": amount, "currency": "EUR"}
            response = await client.post("/payments", json=body, headers=headers)
            document = response.json()
            replayed = "  (replayed)" if "idempotent-replayed" in response.headers else ""
            print(f"{title:22} {response.status_code}  {document.get('title', document)}{replayed}")

        key = {"Idempotency-Key": f'"{uuid4()}"'}
        await post("pay 10", 10, key)
        await post("no answer came: again", 10, key)
        await post("same key, another sum", 99, key)
        await post("no key", 10, {})
        await post("pay 10 more", 10, {"Idempotency-Key": f'"{uuid4()}"'})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run_client(make_app(Path(folder) / "keys.db")))
