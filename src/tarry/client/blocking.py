"""How requests are sent by a client that blocks."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.client.service import FOR_EVER, Service
from tarry.client.whole import Whole, answer_of, is_whole
from tarry.errors import TarryError
from tarry.runtime.clocks import world

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import TracebackType
    from typing import Self

    import httpx

    from tarry.client.flows import Flow
    from tarry.client.request import Manner, Request
    from tarry.core.policy import Policy
    from tarry.wire.tasks import EventNews, Page

T = TypeVar("T")


class Sender:
    """Sends by blocking."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        policy: Policy | None = None,
        timeout: float = 10.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._service = service = Service(url, key, policy, timeout)
        import httpx

        from tarry.adapters.httpx import RetryTransport
        from tarry.client.flows import Flows

        self._api = Flows()
        whole: Any = Whole(transport or httpx.HTTPTransport(verify=service.is_secure))

        def opened(transport: Any) -> httpx.Client:
            return httpx.Client(transport=transport, base_url=service.url, headers=service.headers)

        waits, events = service.seen_by("wait"), service.seen_by("events")
        self._http: dict[Manner, httpx.Client] = {
            "retried": opened(RetryTransport(whole, policy=service.policy)),
            "waited": opened(RetryTransport(whole, policy=service.policy, downstream=waits)),
            "once": opened(whole),
            "for_ever": opened(RetryTransport(whole, policy=FOR_EVER, downstream=events)),
        }

    def close(self) -> None:
        """Close the connections."""
        for http in self._http.values():
            http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._service.url!r})"

    def _open(self, request: Request[Any], silence: float | None = None) -> httpx.Response:
        """Send a request; the answer is all there, or it is a stream that begins."""
        import httpx

        http = self._http[request.manner]
        built = self._service.build(http, request, silence)
        try:
            return http.send(built, stream=True)
        except httpx.RequestError as error:
            raise self._service.unreachable(request, error) from error

    def _send(self, request: Request[T]) -> T:
        with closing(self._open(request)) as response:
            return request.result(answer_of(response, response.read()), world.epoch())

    def _run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                if isinstance(step, (float, int)):
                    world.sleep(step, None)
                    step = next(flow)
                    continue
                try:
                    result = self._send(step)
                except TarryError as error:
                    step = flow.throw(error)  # which may add what was done before
                else:
                    step = flow.send(result)
        except StopIteration as end:
            found: T = end.value
            return found

    def _items(self, page_at: Callable[[str | None], Request[Page[T]]]) -> Generator[T, None, None]:
        cursor: str | None = None
        while True:
            page = self._send(page_at(cursor))
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    def _events(self) -> Generator[EventNews, None, None]:
        import httpx

        from tarry.client.stream import PAUSE, SILENCE, EventParser

        request = self._api.events("retried")
        while True:
            with closing(self._open(request, SILENCE)) as response:
                content = response.read() if is_whole(response.headers) else b""
                request.result(answer_of(response, content), world.epoch())
                parser = EventParser()
                with suppress(httpx.RequestError):  # lost: it is opened again
                    for chunk in response.iter_bytes():
                        yield from parser.feed(chunk)
            self._service.tell_lost()
            request = self._api.events("for_ever")
            world.sleep(PAUSE * world.draw(), None)
