"""The server of the page: addresses, errors as answers, and the life of the process.

What the first page does not need is imported when it is asked for.
"""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

import ckptstore
from ckptstore.errors import CkptStoreError, Conflict, InvalidInput, NotFound, ReadOnly, Unavailable
from ckptstore.plugin.text import redact
from ckptstore.plugins.ui.form import FORM
from ckptstore.plugins.ui.guard import Guard
from ckptstore.plugins.ui.jobs import Jobs
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.values import TEXT_CHARACTERS, Json, clip, encode
from ckptstore.plugins.ui.views import view

if TYPE_CHECKING:
    from ckptstore.plugins.ui.downloads import Download

STATIC = Path(__file__).parent / "static"
PORT = 8765
PORTS_TRIED = 20
BODY_BYTES_MAX = 4 << 20
POLL_S, POLL_REMOTE_S = 2, 10


@dataclass(frozen=True)
class Page:
    """The stores of one server, and what it allows."""

    stores: Sequence[OpenStore]
    jobs: Jobs
    token: str
    allow_changes: bool = False

    def site(self, *, static: bool = False) -> Json:
        """What the page asks for first."""
        return {
            "version": ckptstore.__version__,
            "static": static,
            "changes": self.allow_changes,
            "token": self.token if self.allow_changes else "",
            "policies": FORM,
            "stores": [
                {
                    "number": store.number,
                    "name": clip(store.name),
                    "id": store.handle.config.store,
                    "poll_s": POLL_REMOTE_S
                    if store.handle.storage.capabilities.slow_requests
                    else POLL_S,
                }
                for store in self.stores
            ],
        }

    def store(self, request: Request) -> OpenStore:
        number: int = request.path_params["store"]
        if number >= len(self.stores):
            raise NotFound(f"no store {number}; there are {len(self.stores)}")
        return self.stores[number]


def make_app(page: Page, *, host: str, port: int) -> ASGIApp:
    """The application for a server at `host` and `port`."""
    routes = [
        Route("/", partial(_index, page), methods=["GET"]),
        Route("/data/site.json", partial(_site, page), methods=["GET"]),
        Route("/data/{store:int}/{address:path}", partial(_data, page), methods=["GET"]),
        Route("/download/{store:int}/{commit}/{leaf}.{format}", partial(_leaf, page)),
        Route("/download/{store:int}/{commit}.safetensors", partial(_selection, page)),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    if page.allow_changes:
        routes.append(Route("/change/{store:int}/{name}", partial(_change, page), methods=["POST"]))
    app = Starlette(routes=routes, exception_handlers={CkptStoreError: _failed})
    return Guard(app, token=page.token, host=host, port=port)


async def _failed(request: Request, error: Exception) -> Response:
    """An error of the store, as a message and a status by its class."""
    statuses = ((NotFound, 404), (InvalidInput, 400), (Conflict, 409), (ReadOnly, 403))
    status = next((status for kind, status in statuses if isinstance(error, kind)), 500)
    if isinstance(error, Unavailable):
        status = 503
    message = clip(redact(str(error)), TEXT_CHARACTERS)
    return _json({"error": message, "kind": type(error).__name__}, status)


def _json(value: Json, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def _index(page: Page, request: Request) -> Response:
    return Response((STATIC / "index.html").read_bytes(), media_type="text/html")


async def _site(page: Page, request: Request) -> Response:
    return _json(page.site())


async def _data(page: Page, request: Request) -> Response:
    address, store = request.path_params["address"], page.store(request)
    asked = {name: request.query_params.getlist(name) for name in request.query_params}
    return await run_in_threadpool(lambda: _json(view(store, page.jobs, address, asked)))


async def _leaf(page: Page, request: Request) -> Response:
    from ckptstore.plugins.ui.downloads import one_tensor

    found = request.path_params
    if found["format"] not in ("npy", "safetensors"):
        raise NotFound("a tensor is downloaded as .npy or .safetensors")
    store = page.store(request)
    return _file(
        await run_in_threadpool(one_tensor, store, found["commit"], found["leaf"], found["format"])
    )


async def _selection(page: Page, request: Request) -> Response:
    from ckptstore.plugins.ui.downloads import selection

    select = request.query_params.get("select", "*")
    store, commit = page.store(request), request.path_params["commit"]
    return _file(await run_in_threadpool(selection, store, commit, select))


def _file(download: "Download") -> Response:
    headers = {
        "content-disposition": f'attachment; filename="{download.name}"',
        "content-length": str(download.nbytes),
    }
    return StreamingResponse(
        download.pieces, headers=headers, media_type="application/octet-stream"
    )


async def _change(page: Page, request: Request) -> Response:
    from ckptstore.plugins.ui.changes import change

    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise InvalidInput(f"a change of more than {BODY_BYTES_MAX:,} bytes")
    store = page.store(request)
    return _json(await run_in_threadpool(change, store, request.path_params["name"], body))


@dataclass(frozen=True)
class Listening:
    """A server whose port is taken, and that answers once `serve` is called."""

    page: Page
    host: str
    listener: socket.socket

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The address with the token."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self.port}/?token={self.page.token}"

    def serve(self) -> None:
        """Answer until the process is interrupted."""
        app = make_app(self.page, host=self.host, port=self.port)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(config).run(sockets=[self.listener])

    def close(self) -> None:
        """Free the port, and end the jobs."""
        self.listener.close()
        self.page.jobs.close()


def listen(
    stores: Sequence[OpenStore], *, host: str, port: int | None, allow_changes: bool = False
) -> Listening:
    """Take `port`, or the first free one from `PORT` on. Raises `Unavailable` if it is taken."""
    tried = [port] if port is not None else [*range(PORT, PORT + PORTS_TRIED), 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in tried:
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
        except OSError as error:
            listener.close()
            last = error
            continue
        listener.listen(128)
        page = Page(stores, Jobs(), secrets.token_urlsafe(32), allow_changes)
        return Listening(page, host, listener)
    raise Unavailable(
        f"cannot listen on {host}:{tried[0]}: {last.strerror or last}; --port names another port"
    ) from last
