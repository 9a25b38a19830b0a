"""Ask the ssh-agent of this login for a signature by a key that it holds.

One request and one answer of the agent's protocol:
https://datatracker.ietf.org/doc/html/draft-miller-ssh-agent.
"""

import os
import socket
import struct

from ckptstore.errors import InvalidInput, Unavailable

VARIABLE = "SSH_AUTH_SOCK"
"""Where a login keeps the path of its agent's socket."""

ANSWER_BYTES_MAX = 1 << 16
WAIT_S = 120
"""An agent may ask its user first (`ssh-add -c`)."""

_KIND = b"ssh-ed25519"
_SIGN_REQUEST, _SIGN_RESPONSE = 13, 14


def sign_by_agent(public: bytes, message: bytes) -> bytes:
    """The signature of `message` by the Ed25519 key whose public half is `public`, 64 bytes that
    nobody has verified.

    Raises:
        InvalidInput: There is no agent, or it does not sign with this key.
        Unavailable: The agent does not answer.
    """
    place = os.environ.get(VARIABLE)
    if not place:
        raise InvalidInput(
            f"no ssh-agent: ${VARIABLE} is not set; start one with `eval $(ssh-agent)`, or name "
            "the file of the private key"
        )
    blob = _string(_KIND) + _string(public)
    asked = bytes([_SIGN_REQUEST]) + _string(blob) + _string(message) + struct.pack(">I", 0)
    try:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.settimeout(WAIT_S)
            agent.connect(place)
            agent.sendall(_string(asked))
            answer = _receive(agent)
    except (OSError, ValueError) as error:
        raise Unavailable(f"the ssh-agent at {place} does not answer: {error}") from error
    kind = bytes([_SIGN_RESPONSE])
    begins = kind + struct.pack(">I", len(_string(_KIND)) + 4 + 64) + _string(_KIND)
    if not answer.startswith(begins + struct.pack(">I", 64)):
        raise InvalidInput(
            f"the ssh-agent at {place} does not sign with this key; `ssh-add FILE` gives it the "
            "private key, `ssh-add -l` lists those that it has"
        )
    return answer[len(begins) + 4 :]


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _receive(agent: socket.socket) -> bytes:
    with agent.makefile("rb") as stream:
        head = stream.read(4)
        size = struct.unpack(">I", head)[0] if len(head) == 4 else 0
        answer = stream.read(size) if 0 < size <= ANSWER_BYTES_MAX else b""
    if not answer or len(answer) < size:
        raise ValueError("its answer ends early, or is too long")
    return answer
