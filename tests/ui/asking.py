"""Ask the page's application as a browser does, without a server."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ckptstore.plugins.ui.jobs import Jobs
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.server import Page, make_app
from ckptstore.repository.store_handle import StoreHandle

TOKEN, PORT = "right-token", 8765
ORIGIN = f"http://127.0.0.1:{PORT}"
COOKIE = {"cookie": f"ckptstore-{PORT}={TOKEN}"}


class Browser:
    """Sends requests with the cookie, and the headers of a page of this origin, unless told
    otherwise."""

    def __init__(self, page: Page, *, host: str = "127.0.0.1") -> None:
        self.page = page
        self._app = make_app(page, host=host, port=PORT)

    def ask(
        self,
        address: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> httpx.Response:
        """One request with exactly these headers, with the cookie if there are none."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
                given = COOKIE if headers is None else headers
                return await client.request(method, address, headers=given, content=content)

        return asyncio.run(send())

    def view(self, address: str, store: int = 0) -> Any:
        """The JSON of a view; of a job, its value."""
        for _ in range(600):
            answer = self.ask(f"/data/{store}/{address}")
            found = answer.json()
            if "progress" not in found:
                assert answer.status_code == 200, found
                return found["value"] if set(found) == {"value"} else found
            time.sleep(0.02)
        raise AssertionError(f"{address} does not end")

    def change(self, name: str, body: bytes, **headers: str) -> httpx.Response:
        """A change as the page sends it; a header without text is left out."""
        usual = {**COOKIE, "origin": ORIGIN, "x-ckptstore-token": TOKEN}
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        wanted = {key: value for key, value in {**usual, **given}.items() if value}
        return self.ask(f"/change/0/{name}", method="POST", headers=wanted, content=body)


@contextmanager
def browsing(*places: Path | StoreHandle, allow_changes: bool = False) -> Iterator[Browser]:
    """A browser of a page of these stores, whose handles it closes."""
    handles = [StoreHandle(place) if isinstance(place, Path) else place for place in places]
    stores = [OpenStore(number, handle) for number, handle in enumerate(handles)]
    jobs = Jobs()
    try:
        yield Browser(Page(stores, jobs, TOKEN, allow_changes))
    finally:
        jobs.close()
        for store in stores:
            store.close()
