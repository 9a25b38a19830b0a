"""Who may ask: requests that hold the token, for this host, and changes from this page alone.

The token comes once in the address, as Jupyter does it, and becomes a cookie that no script reads
and no other site sends. The Host header must name this server, which stops DNS rebinding. Whatever
is no GET must come from this origin and repeat the token in a header, which no form of another page
can. Every answer forbids what the page does not need.
"""

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_HEADER = "x-ckptstore-token"
URL_BYTES_MAX = 4_096
"""Less than the 4,300 digits of a number that Python refuses to read."""
_LOCAL = ("127.0.0.1", "localhost", "[::1]")

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware that refuses what may not be asked, and adds `HEADERS` to every answer."""

    def __init__(self, app: "ASGIApp", *, token: str, host: str, port: int) -> None:
        self._app, self._token, self._port = app, token, port
        self._any = _is_any(host)
        self._hosts = {f"{name}:{port}" for name in (*_LOCAL, _bracketed(host))}
        if port == 80:
            self._hosts |= {*_LOCAL, _bracketed(host)}
        self._cookie = f"ckptstore-{port}"

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        given = _query_token(scope)
        why, extra = self._refusal(scope, headers, given), dict(HEADERS)
        if not why and given:
            extra["set-cookie"] = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"

        async def guarded(message: "Message") -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode("latin-1")) for name, value in extra.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        if why:
            body = f"{why}\n".encode()
            plain = [(b"content-type", b"text/plain; charset=utf-8")]
            await guarded({"type": "http.response.start", "status": 403, "headers": plain})
            await guarded({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, guarded)

    def _refusal(self, scope: "Scope", headers: dict[str, str], given: str | None) -> str:
        """Why this request is refused; empty if it is not."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            return "refused: the Host header names another server"
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > URL_BYTES_MAX:
            return "refused: the address is too long"
        if _climbs(scope):
            return "refused: the address has .. in it"
        kept = self._kept(headers.get("cookie", ""))
        if not (self._matches(given) or self._matches(kept)):
            return "refused: open the address that `ckptstore ui` has printed, with its token"
        if scope["method"] in ("GET", "HEAD"):
            return ""
        if headers.get("origin") not in (f"http://{host}", f"https://{host}"):
            return "refused: a change must come from this page"
        if not self._matches(headers.get(TOKEN_HEADER)):
            return "refused: a change needs the token in its header"
        return ""

    def _is_ours(self, host: str) -> bool:
        if host in self._hosts:
            return True
        name, _, port = host.rpartition(":")
        if not self._any or port != str(self._port):
            return False
        return name == socket.gethostname() or _is_address(name.strip("[]"))

    def _kept(self, cookies: str) -> str | None:
        try:
            found = SimpleCookie(cookies).get(self._cookie)
        except CookieError:
            return None
        return found.value if found else None

    def _matches(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(
            given.encode("utf-8", "replace"), self._token.encode()
        )


def _query_token(scope: "Scope") -> str | None:
    if scope["path"] != "/":
        return None
    found = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
    return found[0] if len(found) == 1 else None


def _climbs(scope: "Scope") -> bool:
    raw = (scope.get("raw_path") or b"").decode("latin-1").lower()
    texts: Iterable[str] = (scope["path"], raw.replace("%2e", "."))
    return any(".." in text or "\\" in text or "\0" in text for text in texts)


def is_loopback(host: str) -> bool:
    """Whether a server at `host` is reachable from this machine alone."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_any(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
