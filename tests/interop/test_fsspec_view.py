"""Any commit is a tree of files for fsspec: adopted files byte for byte, and safetensors files of
its tensors; ranges are verified, nothing is written.
"""

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load, load_file

from ckptstore.errors import Corrupt, InvalidInput, NotFound, ReadOnly
from ckptstore.interop.formats import export
from ckptstore.interop.fsspec import (
    CheckpointFileSystem,
    parse_url,
    url_of,
)
from ckptstore.plugins.adopt import commit_files
from ckptstore.plugins.adopt.commit_files import CommitFiles
from ckptstore.snapshot import Snapshot, contents_of
from ckptstore.store import Store
from tests.interop.adopt import test_round_trips
from tests.interop.adopt.trees import hugging_face, tree_of

pytestmark = [
    pytest.mark.pickles,
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage"),
]

fsspec.register_implementation("ckptstore", CheckpointFileSystem, clobber=True)


@pytest.fixture
def fs() -> CheckpointFileSystem:
    return CheckpointFileSystem(skip_instance_cache=True)


@pytest.fixture
def adopted(store: Store, tmp_path: Path) -> Snapshot:
    hugging_face(tmp_path / "out", tmp_path / "ran")
    return store.adopt(tmp_path / "out", step=5, metrics={"loss": 0.5})


def native(store: Store) -> tuple[Snapshot, dict[str, torch.Tensor]]:
    """A commit of a model, its optimizer and a value."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 7))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "at": {"step": 3}}
    snapshot = store.commit(state, step=3, metrics={"loss": 1.0})
    return snapshot, {name: value.detach() for name, value in model.state_dict().items()}


DIRECTORIES: list[Callable[[Path], None]] = [
    test_round_trips.huggingface,
    test_round_trips.peft,
    test_round_trips.index_and_shards,
    test_round_trips.lightning,
    test_round_trips.distributed,
    test_round_trips.sharded_safetensors,
    test_round_trips.deepspeed,
    test_round_trips.arrays,
    test_round_trips.gguf_file,
    test_round_trips.torch_oddities,
    test_round_trips.plain,
]


@pytest.mark.parametrize("make", DIRECTORIES, ids=lambda make: make.__name__)
def test_adopted_directories_are_equal_byte_for_byte(
    store: Store, tmp_path: Path, fs: CheckpointFileSystem, make: Callable[[Path], None]
) -> None:
    root = tmp_path / "source"
    make(root)
    url = url_of(store.adopt(root))
    wanted = {}  # the bytes of each file, also of links to files; None for a directory
    for path in (root, *root.rglob("*")):
        if path.resolve().is_relative_to(root) and not (path.is_symlink() and path.is_dir()):
            name = path.relative_to(root).as_posix()
            wanted[name] = None if path.is_dir() else path.read_bytes()
    base = fs._strip_protocol(url)
    found = {path.removeprefix(f"{base}/") for path in fs.find(url)}
    assert found == {name for name, content in wanted.items() if content is not None}
    fs.get(f"{url}/", str(tmp_path / "copy") + "/", recursive=True)
    copied = tree_of(tmp_path / "copy").items()
    assert {name: content for name, (_, _, content) in copied} == wanted
    for name, (mode, mtime_ns, content) in tree_of(root).items():
        if isinstance(content, bytes):
            info = fs.info(f"{url}/{name}")
            assert (info["size"], info["mode"]) == (len(content), mode & 0o7777)
            assert info["mtime"] == pytest.approx(mtime_ns / 1e9)


def test_tensors_of_a_commit_are_safetensors_files(
    store: Store, tmp_path: Path, fs: CheckpointFileSystem
) -> None:
    snapshot, weights = native(store)
    url = f"ckptstore://{store.url}@best:loss"
    assert fs.ls(url, detail=False) == [
        fs._strip_protocol(f"{url}/{name}.safetensors") for name in ("model", "optimizer")
    ]
    with fsspec.open(f"{url}/model.safetensors") as file:
        found = load(file.read())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    for key in ("model", "optimizer"):
        export(snapshot, tmp_path / f"{key}.safetensors", select=key)
        exported = (tmp_path / f"{key}.safetensors").read_bytes()
        assert fs.cat_file(f"{url}/{key}.safetensors") == exported
        assert fs.info(f"{url}/{key}.safetensors")["size"] == len(exported)
    fs.get(f"{url}/model.safetensors", str(tmp_path / "copied.safetensors"))
    assert load_file(tmp_path / "copied.safetensors").keys() == weights.keys()


def test_tensors_of_adopted_files_are_there_too_but_unlisted(
    store: Store, adopted: Snapshot, fs: CheckpointFileSystem
) -> None:
    url = url_of(adopted)
    assert not [name for name in fs.ls(url, detail=False) if name.endswith("pt.safetensors")]
    moments = load(fs.cat_file(f"{url}/optimizer.pt.safetensors"))
    assert "state.0.exp_avg" in moments


def test_any_range_is_what_was_written(store: Store, adopted: Snapshot) -> None:
    files = CommitFiles(contents_of(adopted), adopted.id, 0)
    rng = random.Random(7)
    for name in ("model.safetensors", "optimizer.pt", "config.json", "optimizer.pt.safetensors"):
        size = files.find(name).size
        whole = files.read(name, 0, size)
        assert len(whole) == size
        edges = [0, 1, 8, size - 1, size, 1 << 16, (1 << 16) + 1]
        for _ in range(200):
            start, stop = sorted(
                rng.choice(edges) if rng.random() < 0.2 else rng.randrange(size + 1)
                for _ in range(2)
            )
            assert files.read(name, start, stop) == whole[start:stop], (name, start, stop)
    assert files.read("config.json", 5, 5) == files.read("config.json", 1 << 40, 1 << 41) == b""


def test_ranges_of_tensors_of_any_shape(store: Store, tmp_path: Path) -> None:
    tied = torch.randn(70, 300)
    state = {
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "long rows": torch.randn(3, 40_000),
        "deep": torch.randn(2, 5, 20_011),
        "one": torch.randn(1, 1, 90_001),
        "bits": torch.rand(1000) > 0.5,
        "half": torch.randn(333, 77).bfloat16(),
        "tied": tied,
        "again": tied,
        "strided": torch.randn(500, 60).t(),
    }
    snapshot = store.commit({"model": state}, step=1)
    export(snapshot, tmp_path / "model.safetensors", select="model")
    whole = (tmp_path / "model.safetensors").read_bytes()
    files = CommitFiles(contents_of(snapshot), snapshot.id, 0)
    rng = random.Random(11)
    assert files.read("model.safetensors", 0, 1 << 40) == whole
    for _ in range(400):
        start = rng.randrange(len(whole))
        stop = start + rng.choice([1, 7, 300, 70_000, 900_000])
        assert files.read("model.safetensors", start, stop) == whole[start:stop], (start, stop)


def test_kept_windows_are_bounded(
    store: Store, adopted: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_files, "CACHE_BYTES", 200_000)
    files = CommitFiles(contents_of(adopted), adopted.id, 0)
    whole = files.read("optimizer.pt", 0, 1 << 30)
    for start in range(0, len(whole) - 100, 10_000):
        assert files.read("optimizer.pt", start, start + 100) == whole[start : start + 100]
    assert 0 < files._kept_bytes <= 200_000
    assert files._kept_bytes == sum(map(len, files._windows.values()))


def test_damage_is_found_by_the_range_that_has_it(
    store: Store, adopted: Snapshot, fs: CheckpointFileSystem
) -> None:
    url = url_of(adopted, "model.safetensors")
    whole = fs.cat_file(url)
    packs = [path for path in (Path(store.url) / "packs").rglob("*") if path.is_file()]
    for pack in packs:
        data = bytearray(pack.read_bytes())
        place = data.find(whole[-4096:])
        if place >= 0:
            data[place + 9] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(data)
    fresh = CheckpointFileSystem(skip_instance_cache=True)
    fresh.files_of(parse_url(url))._windows.clear()
    assert fresh.cat_file(url, 0, 64) == whole[:64]
    with pytest.raises(Corrupt, match="model"):
        fresh.cat_file(url, -64)


def test_files_behave_as_fsspec_files(
    store: Store, adopted: Snapshot, fs: CheckpointFileSystem, tmp_path: Path
) -> None:
    url = url_of(adopted)
    source = tmp_path / "out"
    whole = (source / "optimizer.pt").read_bytes()
    with fs.open(f"{url}/optimizer.pt", block_size=1 << 12) as file:
        file.seek(-100, os.SEEK_END)
        assert file.read() == whole[-100:]
        file.seek(70_000)
        assert file.read(50) == whole[70_000:70_050]
        again = pickle.loads(pickle.dumps(file))
        assert again.read(10) == whole[70_050:70_060]
        state = torch.load(file, weights_only=True) if not file.seek(0) else None
        assert state and "state" in state
    with fs.open(f"{url}/config.json", "r") as text:
        assert json.load(text)["vocab_size"] == 7
    assert fs.cat([f"{url}/config.json"]).popitem()[1] == (source / "config.json").read_bytes()
    assert fs.cat_file(f"{url}/config.json", -3) == (source / "config.json").read_bytes()[-3:]
    assert [name.rpartition("/")[2] for name in fs.glob(f"{url}/*.json")] == [
        "config.json",
        "trainer_state.json",
    ]
    assert fs.exists(f"{url}/config.json") and not fs.exists(f"{url}/absent")
    assert fs.isdir(url) and fs.isfile(f"{url}/config.json") and not fs.isfile(url)
    assert fs.info(url)["commit"] == adopted.id
    assert fs.modified(f"{url}/config.json").timestamp() == pytest.approx(
        (source / "config.json").stat().st_mtime, abs=1e-3
    )
    assert fs.ukey(f"ckptstore://{store.url}@5/config.json") == fs.ukey(f"{url}/config.json")
    assert pickle.loads(pickle.dumps(fs)).cat_file(f"{url}/config.json")


def test_links_lead_to_files_and_never_out(
    store: Store, tmp_path: Path, fs: CheckpointFileSystem
) -> None:
    root = tmp_path / "linked"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(b"bytes")
    (root / "near").symlink_to("a/b/file")
    (root / "a" / "up").symlink_to("../near")
    (root / "folder").symlink_to("a/b")
    (root / "loop").symlink_to("loop")
    (root / "around").symlink_to(".")
    (root / "out").symlink_to("/etc/passwd")
    (root / "dangling").symlink_to("a/gone")
    (root / "above").symlink_to("../../etc/passwd")
    url = url_of(store.adopt(root))
    assert [path.removeprefix(fs._strip_protocol(url)) for path in fs.find(url)] == [
        "/a/b/file",
        "/a/up",
        "/near",
    ]
    for name in ("near", "a/up", "folder/file", "around/around/a/b/file"):
        assert fs.cat_file(f"{url}/{name}") == b"bytes", name
    assert fs.info(f"{url}/near")["destination"] == "a/b/file"
    for name in ("loop", "dangling", "out", "above", "../linked/near", "a/../near", "./near"):
        with pytest.raises(FileNotFoundError):
            fs.cat_file(f"{url}/{name}")


def test_dcp_reads_an_adopted_directory(store: Store, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from tests.interop.dcp_states import NO_DIST, FsspecReader

    state = {"w": torch.randn(300, 80), "b": torch.randn(9), "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    url = url_of(store.adopt(tmp_path / "dcp"))
    for options in ({"storage_reader": FsspecReader(url)}, {"checkpoint_id": url}):
        found = {"w": torch.zeros(300, 80), "b": torch.zeros(9), "step": 0}
        dcp.load(found, **NO_DIST, **options)
        assert torch.equal(found["w"], state["w"]) and torch.equal(found["b"], state["b"])
        assert found["step"] == 7


def test_nothing_can_be_written(
    adopted: Snapshot, fs: CheckpointFileSystem, tmp_path: Path
) -> None:
    url = url_of(adopted)
    file = f"{url}/config.json"
    writes: list[Callable[[], object]] = [
        lambda: fs.open(file, "wb"),
        lambda: fs.open(file, "w"),
        lambda: fs.open(file, "ab"),
        lambda: fs.open(file, "xb"),
        lambda: fs.open(file, "r+b"),
        lambda: fs.pipe(file, b""),
        lambda: fs.pipe_file(file, b""),
        lambda: fs.touch(file),
        lambda: fs.rm(url, recursive=True),
        lambda: fs.rm_file(file),
        lambda: fs.delete(file),
        lambda: fs.mkdir(f"{url}/new"),
        lambda: fs.makedirs(f"{url}/new"),
        lambda: fs.rmdir(url),
        lambda: fs.put(str(tmp_path / "out"), url, recursive=True),
        lambda: fs.put_file(__file__, file),
        lambda: fs.cp_file(file, f"{url}/copy"),
        lambda: fs.copy(file, f"{url}/copy"),
        lambda: fs.mv(file, f"{url}/moved"),
        lambda: fs.write_text(file, "x"),
        lambda: fs.start_transaction(),
    ]
    for write in writes:
        with pytest.raises(ReadOnly, match="never change") as caught:
            write()
        assert isinstance(caught.value, PermissionError)


def test_what_is_not_there_is_a_missing_file(
    adopted: Snapshot, fs: CheckpointFileSystem, tmp_path: Path
) -> None:
    url = url_of(adopted)
    base = url.partition("@")[0]
    for missing in (f"{url}/no", f"{base}@no-tag/f", f"ckptstore://{tmp_path}/no@1/f"):
        for call in (fs.info, fs.ls, fs.cat_file, fs.open):
            with pytest.raises(FileNotFoundError) as caught:
                call(missing)
            assert isinstance(caught.value, NotFound)
    with pytest.raises(IsADirectoryError):
        fs.cat_file(url)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        fs.open(f"{url}/absent.bin")


def test_tensors_without_a_place_in_such_files_are_not_listed(
    store: Store, fs: CheckpointFileSystem
) -> None:
    both = {"a.b": torch.ones(2), "a": {"b": torch.ones(3)}}
    wide = {"c": torch.ones(2, dtype=torch.complex128)}
    url = url_of(store.commit({"both": both, "wide": wide, "good": {"w": torch.ones(1)}}, step=1))
    assert [path.rpartition("/")[2] for path in fs.ls(url, detail=False)] == ["good.safetensors"]
    for name in ("both", "wide"):
        with pytest.raises(InvalidInput):
            fs.open(f"{url}/{name}.safetensors")


def test_threads_and_forked_children_read(adopted: Snapshot, tmp_path: Path) -> None:
    url = url_of(adopted, "optimizer.pt")
    whole = (tmp_path / "out" / "optimizer.pt").read_bytes()

    def read(start: int) -> bool:
        with fsspec.open(url) as file:
            file.seek(start)
            return bool(file.read(5000) == whole[start : start + 5000])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(0, len(whole), 5000)))
    with fsspec.filesystem("ckptstore").open(url, cache_type="none") as file:
        parents = file._files
        child = os.fork()
        if not child:
            file.seek(70_000)
            own = file.read(9) == whole[70_000:70_009] and file._files is not parents
            os._exit(0 if own and read(1234) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_files_are_read_without_torch(adopted: Snapshot) -> None:
    code = (
        "import sys; from ckptstore.interop.fsspec import CheckpointFileSystem as C;"
        f"assert len(C().cat_file({url_of(adopted, 'model.safetensors')!r})) > 9;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
