"""A URL that lost a slash, as `pathlib` does to it, is no directory of this host."""

import argparse
import os
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.cli.call import Exit
from ckptstore.core.paths import check_path
from ckptstore.errors import InvalidInput
from ckptstore.interop.formats import export
from tests.cli.running import call


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_path_of_a_url_is_refused_with_the_url_that_was_meant(here: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    place = parser.parse_args(["s3://bucket/run"]).place
    for read_only in (True, False):
        with pytest.raises(InvalidInput, match=r"if the URL s3://bucket/run is meant"):
            ckptstore.open(place, read_only=read_only)
    assert os.listdir(here) == []


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3:/bkt/y", "s3://bkt/y"),
        ("gs:/b", "gs://b"),
        ("memory:/x", "memory://x"),
        ("file:/data/x", "file:///data/x"),
        ("https:/host/x", "https://host/x"),
        ("S3:/b", "S3://b"),
    ],
)
def test_any_scheme_is_looked_at(here: Path, text: str, url: str) -> None:
    with pytest.raises(InvalidInput, match=f"the URL {url} is meant"):
        check_path(text)
    for words in (("-s", text, "log"), ("init", text), ("-s", text, "fsck"), ("-s", text, "init")):
        done = call(*words)
        assert done.code in (Exit.USAGE, Exit.FAILED, Exit.NO_STORE)
        assert f"the URL {url} is meant" in done.err
    assert os.listdir(here) == []


@pytest.mark.parametrize("text", ["./s3:/b", "s3:", "a:b/c", "runs/s3:/x", "/s3:/x", "run:1"])
def test_a_name_with_a_colon_stays_a_name(text: str) -> None:
    check_path(text)


def test_other_ends_and_files_are_looked_at_too(here: Path) -> None:
    with ckptstore.open("store") as store:
        store.commit({"w": torch.ones(2)}, step=1)
        for action in (
            lambda: store.push(Path("s3://bucket/mirror"), create=True),
            lambda: store.pull(Path("s3://bucket/mirror")),
            lambda: store.repair(Path("s3://bucket/mirror")),
            lambda: export(store.checkout(1), Path("s3://bucket/w.safetensors")),
            lambda: ckptstore.write_pointer(Path("s3://bucket/best"), store),
        ):
            with pytest.raises(InvalidInput, match="the URL s3://bucket/"):
                action()
    at = ("-s", "store")
    for words in (
        ("push", "s3:/bucket/m", "--create"),
        ("clone", "store", "s3:/bucket/m"),
        ("export", "1", "s3://bucket/w.safetensors"),
        ("repair", "--from", "s3:/bucket/m"),
    ):
        done = call(*at, *words)
        assert done.code != Exit.OK
        assert "the URL s3://bucket/" in done.err, (words, done)
    assert os.listdir(here) == ["store"]
