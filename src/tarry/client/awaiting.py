"""How requests are sent by a client that awaits: what `blocking.py` is, step for step."""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.client.service import FOR_EVER, Service
from tarry.client.whole import AsyncWhole, answer_of, is_whole
from tarry.errors import TarryError
from tarry.runtime.clocks import world

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from types import TracebackType
    from typing import Self

    import httpx

    from tarry.client.flows import Flow
    from tarry.client.request import Manner, Request
    from tarry.core.policy import Policy
    from tarry.wire.tasks import EventNews, Page

T = TypeVar("T")


class AsyncSender:
    """Sends by awaiting, on asyncio or trio."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        policy: Policy | None = None,
        timeout: float = 10.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._service = service = Service(url, key, policy, timeout)
        import httpx

        from tarry.adapters.httpx import AsyncRetryTransport
        from tarry.client.flows import Flows

        self._api = Flows()
        whole: Any = AsyncWhole(transport or httpx.AsyncHTTPTransport(verify=service.is_secure))

        def opened(transport: Any) -> httpx.AsyncClient:
            return httpx.AsyncClient(
                transport=transport, base_url=service.url, headers=service.headers
            )

        waits, events = service.seen_by("wait"), service.seen_by("events")
        self._http: dict[Manner, httpx.AsyncClient] = {
            "retried": opened(AsyncRetryTransport(whole, policy=service.policy)),
            "waited": opened(AsyncRetryTransport(whole, policy=service.policy, downstream=waits)),
            "once": opened(whole),
            "for_ever": opened(AsyncRetryTransport(whole, policy=FOR_EVER, downstream=events)),
        }

    async def aclose(self) -> None:
        """Close the connections."""
        for http in self._http.values():
            await http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._service.url!r})"

    async def _open(self, request: Request[Any], silence: float | None = None) -> httpx.Response:
        """Send a request; the answer is all there, or it is a stream that begins."""
        import httpx

        http = self._http[request.manner]
        built = self._service.build(http, request, silence)
        try:
            return await http.send(built, stream=True)
        except httpx.RequestError as error:
            raise self._service.unreachable(request, error) from error

    async def _send(self, request: Request[T]) -> T:
        async with aclosing(await self._open(request)) as response:
            return request.result(answer_of(response, await response.aread()), world.epoch())

    async def _run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                if isinstance(step, (float, int)):
                    await world.asleep(step)
                    step = next(flow)
                    continue
                try:
                    result = await self._send(step)
                except TarryError as error:
                    step = flow.throw(error)  # which may add what was done before
                else:
                    step = flow.send(result)
        except StopIteration as end:
            found: T = end.value
            return found

    async def _items(
        self, page_at: Callable[[str | None], Request[Page[T]]]
    ) -> AsyncGenerator[T, None]:
        cursor: str | None = None
        while True:
            page = await self._send(page_at(cursor))
            for item in page.items:
                yield item
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _events(self) -> AsyncGenerator[EventNews, None]:
        import httpx

        from tarry.client.stream import PAUSE, SILENCE, EventParser

        request = self._api.events("retried")
        while True:
            async with aclosing(await self._open(request, SILENCE)) as response:
                content = await response.aread() if is_whole(response.headers) else b""
                request.result(answer_of(response, content), world.epoch())
                parser = EventParser()
                with suppress(httpx.RequestError):  # lost: it is opened again
                    async for chunk in response.aiter_bytes():
                        for event in parser.feed(chunk):
                            yield event
            self._service.tell_lost()
            request = self._api.events("for_ever")
            await world.asleep(PAUSE * world.draw())
