"""The exported page has what it asks for, the command says what it serves, and what is shipped is
what was chosen."""

import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import ckptstore
from ckptstore.plugins.ui.server import STATIC
from tests.cli.running import call, environment

VENDORED = {
    "echarts.esm.min.js": "28515f26aa57f87eb1e4ed4eb446927eaf329b5f5e02b4bfd4b0264fea40d1da",
}
"""SHA-256 of the files of other projects, as their packages have them: echarts 6.1.0 on npm."""


def test_vendored_files_are_those_of_their_packages_with_their_licences() -> None:
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (STATIC / "vendor").glob("*.js")
    }
    assert found == VENDORED
    licence = (STATIC / "vendor" / "echarts.LICENSE").read_text()
    assert "Apache License" in licence and "BSD 3-Clause (d3.js)" in licence
    assert "Apache Software Foundation" in (STATIC / "vendor" / "echarts.NOTICE").read_text()
    assert "Bostock" in (STATIC / "vendor" / "d3.LICENSE").read_text()


def test_the_page_has_no_inline_script_or_style_and_names_no_other_host() -> None:
    own = [*STATIC.glob("*.js"), *STATIC.glob("*.css"), STATIC / "index.html"]
    assert len(own) > 10
    for path in own:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        hosts = set(re.findall(r"(?:https?:)?//([a-z0-9.-]+\.[a-z]+)", text))
        assert hosts <= {"www.w3.org"}, f"{path.name} names {hosts}"
    index = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", index)


def test_an_export_holds_all_views_of_the_newest_commits(place: Path, tmp_path: Path) -> None:
    words = ("ui", "--export", str(tmp_path / "x"), "--commits", "3")
    result = call("--json", "-s", str(place), *words)
    assert result.code == 0, result.err
    site = json.loads((tmp_path / "x/data/site.json").read_text())
    assert site["static"] and not site["changes"] and not site["token"]
    assert (tmp_path / "x/index.html").exists()
    assert (tmp_path / "x/static/vendor/echarts.esm.min.js").exists()
    store = json.loads((tmp_path / "x/data/0/store.json").read_text())
    for run in store["runs"]:
        assert (tmp_path / f"x/data/0/run/{run['key']}.json").exists()
    newest = store["recent"][0]["id"]
    parent = json.loads((tmp_path / f"x/data/0/commit/{newest}.json").read_text())["parents"][0]
    for name in (f"leaves/{newest}/0", f"sharing/{newest}", f"diff/{parent['id']}/{newest}"):
        assert "error" not in json.loads((tmp_path / f"x/data/0/{name}.json").read_text())
    # three newest and the tagged one
    assert len(list((tmp_path / "x/data/0/commit").iterdir())) == 4
    assert "value" in json.loads((tmp_path / "x/data/0/health.json").read_text())


def test_an_export_goes_to_a_new_directory_only(place: Path, tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("mine")
    result = call("-s", str(place), "ui", "--export", str(tmp_path))
    assert result.code == 2 and "is not empty" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]


def test_the_command_prints_an_address_and_serves_it_until_interrupted(place: Path) -> None:
    command = f"ckptstore -s {place} ui --port 0 -s {place}"
    words = [sys.executable, "-m", *command.split()]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", url)
        with urllib.request.urlopen(url) as answer:
            assert b"ckptstore" in answer.read()
            cookie = answer.headers["set-cookie"].partition(";")[0]
        base = url.partition("?")[0]
        asked = urllib.request.Request(f"{base}data/site.json", headers={"cookie": cookie})
        with urllib.request.urlopen(asked) as answer:
            site = json.load(answer)
        assert len(site["stores"]) == 2 and site["version"] == ckptstore.__version__
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr is not None and process.stderr.read() == ""


def test_a_port_that_is_taken_is_named(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = call("-s", str(place), "ui", "--port", str(port))
    assert result.code == 1 and f"127.0.0.1:{port}" in result.err and "--port" in result.err


@pytest.mark.parametrize("port", ["x", "-1", "65536", "1e3"])
def test_a_port_is_a_number(place: Path, port: str) -> None:
    assert call("-s", str(place), "ui", f"--port={port}").code == 2


def test_without_the_extra_the_command_says_what_to_install(place: Path) -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; from ckptstore.cli.main import main; "
        f"sys.exit(main(['-s', {str(place)!r}, 'ui']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install 'ckptstore[ui]'" in done.stderr
