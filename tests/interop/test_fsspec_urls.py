"""A `ckptstore://` URL has one meaning: store, commit and file, in directories and buckets."""

import os
import shutil
import tomllib
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load

import ckptstore
from ckptstore.errors import InvalidInput
from ckptstore.interop.fsspec import (
    CheckpointFileSystem,
    CommitUrl,
    open_url,
    parse_url,
    pinned,
    url_of,
)
from ckptstore.interop.vllm import weights_of
from ckptstore.objects.documents import decode_config, encode_config
from ckptstore.store import Store
from tests.support.servers.s3 import new_url, s3_server

fsspec.register_implementation("ckptstore", CheckpointFileSystem, clobber=True)


@pytest.fixture
def fs() -> CheckpointFileSystem:
    return CheckpointFileSystem(skip_instance_cache=True)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("ckptstore:///a/b@latest/x/y", CommitUrl("/a/b", "latest", "x/y")),
        ("ckptstore:///a/b@run@100~2", CommitUrl("/a/b", "run@100~2", "")),
        ("ckptstore:///a%40b/c@best:loss:max/x@y", CommitUrl("/a@b/c", "best:loss:max", "x@y")),
        ("ckptstore:///a@team%2Fgood/100%.json", CommitUrl("/a", "team/good", "100%.json")),
        ("ckptstore://s3://bucket/run@8f3a1c/m", CommitUrl("s3://bucket/run", "8f3a1c", "m")),
        ("ckptstore://s3:/bucket/run@8f3a1c/m", CommitUrl("s3://bucket/run", "8f3a1c", "m")),
        ("ckptstore://file:///a/b@1", CommitUrl("/a/b", "1", "")),
        ("ckptstore://a/../b@1/f", CommitUrl(os.path.abspath("b"), "1", "f")),
        ("ckptstore:/a/b@1/f", CommitUrl("/a/b", "1", "f")),
        ("/a/b@1/f", CommitUrl("/a/b", "1", "f")),
    ],
)
def test_a_url_has_one_meaning(url: str, place: CommitUrl) -> None:
    assert parse_url(url) == place
    stripped = CheckpointFileSystem._strip_protocol(url)
    assert CheckpointFileSystem._strip_protocol(stripped) == stripped
    assert parse_url(stripped) == place


@pytest.mark.parametrize("url", ["ckptstore:///a/b", "ckptstore:///a/b@", "ckptstore://@1/x", ""])
def test_a_url_without_a_commit_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="STORE@REF/FILE"):
        parse_url(url)
    with pytest.raises(FileNotFoundError, match="STORE@REF/FILE"):
        CheckpointFileSystem().ls(url)


def test_odd_names_come_back_in_urls(tmp_path: Path) -> None:
    place = tmp_path / "at@home %41"
    with ckptstore.open(place) as store:
        snapshot = store.commit({"a/b%": {"w": torch.ones(3)}}, tag="team/x+y")
        url = url_of(snapshot, "a%2Fb%25.safetensors")
        assert parse_url(url) == CommitUrl(str(place), snapshot.id, "a%2Fb%25.safetensors")
        with fsspec.open(url) as file:
            assert torch.equal(load(file.read())["w"], torch.ones(3))
        base = url.partition("@")[0]
        assert pinned(f"{base}@team%2Fx+y/f") == url_of(snapshot, "f")


def test_a_moving_ref_is_looked_up_by_each_call_and_a_file_stays(
    store: Store, fs: CheckpointFileSystem, tmp_path: Path
) -> None:
    latest = f"ckptstore://{store.url}@latest/model.safetensors"
    first = store.commit({"model": {"w": torch.zeros(70_000)}}, step=1)
    with fs.open(latest, block_size=1 << 12) as file:
        begin = file.read(4096)
        second = store.commit({"model": {"w": torch.ones(70_000)}}, step=2)
        assert begin + file.read() == fs.cat_file(url_of(first, "model.safetensors"))
    assert fs.cat_file(latest) == fs.cat_file(url_of(second, "model.safetensors"))
    assert pinned(latest) == url_of(second, "model.safetensors")
    with open_url(latest) as opened:
        assert opened.id == second.id
        assert torch.equal(opened.read("model/w"), torch.ones(70_000))


def test_a_bucket_is_read_by_its_url(tmp_path: Path, fs: CheckpointFileSystem) -> None:
    place = f"memory://{tmp_path.name}"
    with ckptstore.open(place) as store:
        snapshot = store.commit({"model": {"w": torch.arange(9.0)}}, step=1)
        for start in ("memory://", "memory:/"):
            url = f"ckptstore://{start}{tmp_path.name}@1"
            assert [found["size"] for found in fs.ls(url)] == [
                fs.info(f"{url}/model.safetensors")["size"]
            ]
            with fsspec.open(f"{url}/model.safetensors") as file:
                assert torch.equal(load(file.read())["w"], torch.arange(9.0))
            assert fs.glob(f"{url}/*.safetensors") == fs.find(url)
        assert url_of(snapshot).startswith(f"ckptstore://{place}@")


def test_a_bucket_of_s3_takes_the_options_of_its_client() -> None:
    with s3_server() as server:
        place = new_url()
        options = server.options()
        with ckptstore.open(place, storage=ckptstore.Storage(options=options)) as store:
            snapshot = store.commit({"model": {"w": torch.arange(90_000.0)}}, step=1)
            url = url_of(snapshot, "model.safetensors")
            assert url == f"ckptstore://{place}@{snapshot.id}/model.safetensors"
        with fsspec.open(
            f"ckptstore://{place}@1/model.safetensors", target_options=options
        ) as file:
            assert torch.equal(load(file.read())["w"], torch.arange(90_000.0))
        assert pinned(f"ckptstore://{place}@latest", target_options=options) in url
        with open_url(url, target_options=options) as opened:
            assert torch.equal(opened.read("model/w"), torch.arange(90_000.0))


def test_a_store_made_anew_in_its_place_is_another(
    tmp_path: Path, fs: CheckpointFileSystem
) -> None:
    url = f"ckptstore://{tmp_path}/again@latest/model.safetensors"
    for value in (1.0, 2.0):
        with ckptstore.open(tmp_path / "again") as store:
            store.commit({"model": {"w": torch.full((3,), value)}}, step=1)
        assert torch.equal(load(fs.cat_file(url))["w"], torch.full((3,), value))
        shutil.rmtree(tmp_path / "again")


def test_fsspec_finds_the_filesystem_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    found = project["project"]["entry-points"]["fsspec.specs"]["ckptstore"]
    assert found == f"{CheckpointFileSystem.__module__}:{CheckpointFileSystem.__name__}"


def test_the_weights_that_are_served_are_those_of_their_key_alone(store: Store) -> None:
    average = {"model": {"layer.weight": torch.zeros(3)}}
    made = store.commit({"model": {"model.layer.weight": torch.ones(3)}, "ema": average})
    found = list(weights_of("", {"url": url_of(made)}))
    assert [(name, tensor.tolist()) for name, tensor in found] == [
        ("model.layer.weight", [1.0, 1.0, 1.0])
    ]


# -- options --


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("target_optoins", "did you mean 'target_options'"),
        ("storage_options", "did you mean 'target_options'"),
        ("options", "target_options={…}"),
        ("endpoint_url", r"belong in target_options=\{…\}"),
        ("key", r"belong in target_options=\{…\}"),
        ("thread", "did you mean 'threads'"),
        ("indx", "did you mean 'index'"),
        ("run", "it has target_options, threads, index"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_meant(
    name: str, wanted: str, tmp_path: Path
) -> None:
    with ckptstore.open(tmp_path / "s") as store:
        url = url_of(store.commit({"model": {"w": torch.ones(2)}}, step=1), "model.safetensors")
    for use in (
        lambda: fsspec.filesystem("ckptstore", **{name: {"a": 1}}),
        lambda: fsspec.open(url, **{name: {"a": 1}}),
        lambda: pinned(url, **{name: {"a": 1}}),
    ):
        with pytest.raises(InvalidInput, match=f"no option '{name}'.*{wanted}"):
            use()


def test_options_that_fsspec_has_for_every_filesystem_are_taken() -> None:
    options = {
        "skip_instance_cache": True,
        "use_listings_cache": False,
        "listings_expiry_time": 3,
        "max_paths": 4,
        "asynchronous": False,
        "loop": None,
        "batch_size": 8,
    }
    assert isinstance(fsspec.filesystem("ckptstore", **options), CheckpointFileSystem)


def test_an_option_of_an_open_file_is_refused_with_its_place(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s") as store:
        url = url_of(store.commit({"model": {"w": torch.ones(2)}}, step=1), "model.safetensors")
    with pytest.raises(InvalidInput, match=r"filesystem\('ckptstore'\)\.open\(url, cache_type=…\)"):
        fsspec.open(url, cache_type="none")
    with fsspec.filesystem("ckptstore").open(url, cache_type="none") as file:
        assert load(file.read())["w"].tolist() == [1, 1]


def test_what_messages_advise_exists_where_they_advise_it(tmp_path: Path) -> None:
    """Each message that names an option is met, and its advice is followed."""
    with ckptstore.open(tmp_path / "s") as store:
        url = url_of(store.commit({"model": {"w": torch.ones(2)}}, step=1), "model.safetensors")
    # options of a bucket for a local path: leave them out
    with pytest.raises(InvalidInput, match=r"\['token'\] of a bucket's client .*leave them out"):
        fsspec.filesystem("ckptstore", target_options={"token": "x"}).cat(url)
    assert load(fsspec.filesystem("ckptstore").cat(url))["w"].tolist() == [1, 1]
    # a key in the URL: it belongs into Storage(options=…)
    with pytest.raises(InvalidInput, match=r"storage=Storage\(options=\{\"key\": …"):
        ckptstore.open("s3://key:secret@bucket/x")
    ckptstore.Storage(options={"key": "key", "secret": "secret"})
    # an index for a store whose log is in itself: leave it out
    index = "postgresql+psycopg://nobody@localhost/none"
    for use in (
        lambda: fsspec.filesystem("ckptstore", index=index).cat(url),
        lambda: open_url(url, index=index),
        lambda: ckptstore.open(tmp_path / "s", storage=ckptstore.Storage(index=index)),
    ):
        with pytest.raises(InvalidInput, match="leave index out"):
            use()
    # a log in a database that nobody named
    config = tmp_path / "s" / "ckptstore.json"
    with pytest.raises(
        InvalidInput, match=r"storage=Storage\(index=\"postgresql.*index= in fsspec"
    ):
        _log_elsewhere(config, url)


def _log_elsewhere(config: Path, url: str) -> None:
    """Read a store whose configuration says that a database has its log."""
    moved = decode_config(config.read_bytes(), "").moved("postgresql://host/database", 2)
    config.chmod(0o600)
    config.write_bytes(encode_config(moved))
    fsspec.filesystem("ckptstore", skip_instance_cache=True).cat(url)
