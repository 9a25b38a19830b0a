"""Transports that are shut down after the test, faulty connections between them, and strangers."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

pytest.importorskip(
    "torchft", reason="torchft 0.2 needs torch 2.7, and has no wheel for Python 3.14"
)

from ckptstore.interop.torchft import StoreTransport
from ckptstore.interop.torchft.invitation import Invitation
from ckptstore.interop.torchft.wire import decode_invitation, encode_invitation
from tests.support.servers.proxy import Proxy, proxy_to

Start = Callable[..., StoreTransport[Any]]
Wire = Callable[[StoreTransport[Any]], tuple[str, Proxy]]

SOON = timedelta(seconds=30)
"""Longer than any transfer here; tests of timeouts use less."""

IMPATIENT = timedelta(milliseconds=300)


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes transports."""
    with ExitStack() as stack:

        def make(*args: Any, timeout: timedelta = SOON, **options: Any) -> StoreTransport[Any]:
            transport: StoreTransport[Any] = StoreTransport(timeout, *args, **options)
            stack.callback(transport.shutdown)
            return transport

        yield make


@pytest.fixture
def wire(seed: int) -> Iterator[Wire]:
    """A proxy in front of a transport, and the metadata that leads to it, as to another host."""
    with ExitStack() as stack:

        def lay(transport: StoreTransport[Any]) -> tuple[str, Proxy]:
            invitation = decode_invitation(transport.metadata())
            proxy = stack.enter_context(proxy_to(("127.0.0.1", invitation.addresses[0][1]), seed))
            return encode_invitation(replace(invitation, addresses=(proxy.address,))), proxy

        yield lay


def state_of(chunks: int, seed: int = 1) -> dict[str, Any]:
    """Two tensors of `chunks` MiB together, and values beside them."""
    generator = torch.Generator().manual_seed(seed)
    rows = chunks * 256
    weights = {
        "a": torch.rand((rows // 2, 1024), generator=generator),
        "b": torch.rand((rows - rows // 2, 1024), generator=generator),
    }
    return {
        "user": {"default": {"model": weights, "name": "gpt", "sizes": (1, 2.5, None)}},
        "torchft": {"step": 7, "batches_committed": 9},
    }


def weights_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state["user"]["default"]["model"]
    return found


def copy_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def assert_same(got: Any, wanted: Any, path: str = "") -> None:
    """Equal values of equal types; no tensor contains a NaN here."""
    assert type(got) is type(wanted), path
    if isinstance(wanted, dict):
        assert list(got) == list(wanted), path
        for key in wanted:
            assert_same(got[key], wanted[key], f"{path}/{key}")
    elif isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape, path
        assert torch.equal(got, wanted), path
    else:
        assert got == wanted, path


@contextmanager
def stranger(answer: Callable[[socket.socket], object]) -> Iterator[tuple[str, list[bytes]]]:
    """Another server at a peer's address: the metadata that leads there, and the bytes it
    receives.
    """
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        heard.append(connection.recv(65536))
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield (
            encode_invitation(Invitation("1" * 32, "s3cret" * 10, (listener.getsockname(),))),
            heard,
        )
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
