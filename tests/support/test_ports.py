"""A port that a test was given stays its own until its server is there, and after it was killed."""

import socket

import pytest

from tests.support.servers.ports import free_port


def test_a_port_is_given_to_one_alone() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == len(ports)
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))


def test_a_server_listens_on_it_and_again_after_it_has_ended() -> None:
    port = free_port()
    for _ in range(2):
        address = ("127.0.0.1", port)
        with socket.create_server(address) as server, socket.create_connection(address) as client:
            server.accept()[0].close()  # what closes first lingers on the port
            assert client.recv(1) == b""
