"""Who may ask the page's server: what lacks the token, names another host, comes from elsewhere or
climbs is refused, and every answer forbids the rest."""

from pathlib import Path

import pytest

from ckptstore.plugins.ui.guard import Guard, is_loopback
from tests.ui.asking import COOKIE, ORIGIN, PORT, TOKEN, Browser, browsing

ADDRESSES = ("/", "/data/site.json", "/data/0/store.json", "/static/app.js", "/download/0/a/0.npy")


@pytest.mark.parametrize("address", ADDRESSES)
def test_nothing_is_answered_without_the_token(browser: Browser, address: str) -> None:
    for headers in ({}, {"cookie": f"ckptstore-{PORT}=wrong"}, {"cookie": f"other={TOKEN}"}):
        answer = browser.ask(address, headers=headers)
        assert answer.status_code == 403
        assert "token" in answer.text and TOKEN not in answer.text


def test_the_token_in_the_address_becomes_a_cookie_that_no_script_reads(browser: Browser) -> None:
    answer = browser.ask(f"/?token={TOKEN}", headers={})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"ckptstore-{PORT}={TOKEN};")
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert browser.ask(f"/?token={TOKEN}x", headers={}).status_code == 403
    assert browser.ask(f"/data/site.json?token={TOKEN}", headers={}).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1:1", ""])
def test_another_host_header_is_refused(browser: Browser, host: str) -> None:
    answer = browser.ask("/data/site.json", headers={**COOKIE, "host": host})
    assert (answer.status_code, "Host" in answer.text) == (403, True)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
def test_the_names_of_this_machine_are_accepted(browser: Browser, name: str) -> None:
    headers = {**COOKIE, "host": f"{name}:{PORT}"}
    assert browser.ask("/data/site.json", headers=headers).status_code == 200


def test_a_server_for_all_addresses_is_asked_by_address_and_not_by_any_name(place: Path) -> None:
    with browsing(place) as browser:
        wide = Browser(browser.page, host="0.0.0.0")
        for host, status in (("192.0.2.7", 200), ("[2001:db8::7]", 200), ("evil.example", 403)):
            headers = {**COOKIE, "host": f"{host}:{PORT}"}
            assert wide.ask("/data/site.json", headers=headers).status_code == status, host


@pytest.mark.parametrize(
    "address",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e%2f%2e%2e%2f__init__.py",
        "/data/0/../../store.json",
        "/data/0/commit/%2e%2e.json",
        "/data/0/leaves/..%5c..%5c/0.json",
        "/static//etc/passwd",
        "/static/%00",
        "/download/0/%2e%2e/0.npy",
        f"/data/0/{'x' * 9000}.json",
        f"/data/{'9' * 4400}/store.json",
        f"/download/0/{'0' * 64}/{'9' * 4400}.npy",
    ],
)
def test_an_address_that_climbs_is_refused(browser: Browser, address: str) -> None:
    answer = browser.ask(address)
    assert answer.status_code in (400, 403, 404)
    assert "root:" not in answer.text and "import" not in answer.text


@pytest.mark.parametrize(
    "address",
    ["/data/0/commit/%3Cscript%3E.json", "/data/0/Commit/aa.json", "/data/0/run/a%2Fb%20c.json"],
)
def test_a_part_of_an_address_is_letters_and_digits(browser: Browser, address: str) -> None:
    answer = browser.ask(address)
    assert answer.status_code in (400, 404)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "address", ["/data/7/store.json", "/data/0/nothing.json", "/data/0/commit.json", "/x"]
)
def test_what_is_not_there_is_not_found(browser: Browser, address: str) -> None:
    assert browser.ask(address).status_code == 404


@pytest.mark.parametrize("address", ["/", "/data/site.json", "/static/app.js", "/x"])
@pytest.mark.parametrize("headers", [COOKIE, {}])
def test_every_answer_forbids_what_the_page_does_not_need(
    browser: Browser, address: str, headers: dict[str, str]
) -> None:
    found = browser.ask(address, headers=headers).headers
    policy = found["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert found["x-content-type-options"] == "nosniff"
    assert found["referrer-policy"] == "no-referrer"
    assert found["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in found


def test_a_read_only_page_has_no_changes(browser: Browser) -> None:
    assert browser.change("tag", b'{"name":"x","commit":"000000000000"}').status_code == 404
    assert browser.ask("/data/site.json").json()["token"] == ""
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert browser.ask("/data/site.json", method=method).status_code in (403, 405)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": ""},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": f"http://127.0.0.1:{PORT + 1}"},
        {"origin": f"http://localhost:{PORT}"},
        {"x_ckptstore_token": ""},
        {"x_ckptstore_token": "wrong"},
        {"cookie": ""},
    ],
)
def test_a_change_from_elsewhere_is_refused(place: Path, headers: dict[str, str]) -> None:
    with browsing(place, allow_changes=True) as browser:
        commit = browser.view("store.json")["recent"][0]["id"]
        body = f'{{"name":"stolen","commit":"{commit}"}}'.encode()
        assert browser.change("tag", body, **headers).status_code == 403
        assert "stolen" not in str(browser.view("store.json")["tags"])


def test_only_loopback_addresses_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.0.2.1", "::", "example.org")))


def test_the_guard_answers_nothing_but_http(browser: Browser) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("it was passed on")

    guard = Guard(never, token=TOKEN, host="127.0.0.1", port=PORT)
    assert ORIGIN.endswith(str(PORT))
    coroutine = guard({"type": "websocket"}, never, never)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        coroutine.send(None)
