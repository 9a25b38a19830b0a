"""docs/format.md suffices to read a store: docs/reader.py, which follows it and imports nothing of
ckptstore, finds the exact bytes of every kind of store."""

import ast
import json
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.log.log import Log
from ckptstore.state import tensors
from ckptstore.storage import open_storage
from tests.golden.contents import (
    MOVED_STEPS,
    PATCHED_STEPS,
    ROUNDED_STEPS,
    TAGS,
    moved_state,
    patched_state,
    plain_state,
    rounded_state,
    state,
)
from tests.golden.example import BEGIN, END, PAGE, example
from tests.golden.reader import FILE, described, read, reader

GOLDEN = Path(__file__).parent / "v3"
DTYPES = sorted(name for name, dtype in tensors.DTYPES.items() if dtype not in tensors.QUANTIZED)
LIBRARIES = {"blake3", "xxhash", "zstandard"}


def fresh(place: Path, codec: str = "raw", **options: Any) -> ckptstore.Store:
    storage = ckptstore.Storage(codec=codec, chunk_bytes=64 << 10)
    return ckptstore.open(place, storage=storage, **options)


def of_dtype(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes that zstd shrinks in some planes and not in others."""
    tensor = tensors.empty(name, shape)
    memory = tensors.memory_of(tensor)
    memory[:] = random.randbytes(len(memory))
    memory[:: tensor.itemsize] = bytes(len(memory) // tensor.itemsize)
    return tensor


def bits(x: float) -> str:
    return struct.pack(">d", x).hex()


def test_the_reader_is_short_and_stands_alone() -> None:
    text = FILE.read_text(encoding="utf-8")
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
        if name
    }
    assert imported - set(sys.stdlib_module_names) == LIBRARIES
    assert len(text.splitlines()) <= 298


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_golden_store_is_read(codec: str, step: int) -> None:
    wanted = state(step)
    model = {f"model/{name}": value for name, value in wanted["model"].items()}
    notes = {
        "notes/a%2Fb": "ü ✓",
        "notes/%int:0": None,
        "notes/0": ["list", 1, ["float", bits(2.5)], ["float", bits(-0.0)], ["int", str(2**70)]],
        "notes/t": ["tuple", 1, ["tuple", 2, ["bytes", "AP8="]]],
        "notes/%empty/deep/er": ["float", bits(float("inf"))],
    }
    found = read(GOLDEN / codec, str(step))
    assert found == described({**model, **notes, "step": step})
    assert list(found) == [*model, *notes, "step"]


@pytest.mark.parametrize("step", MOVED_STEPS)
def test_a_compacted_golden_store_is_read(step: int) -> None:
    model = {f"model/{name}": value for name, value in moved_state(step)["model"].items()}
    assert read(GOLDEN / "compacted", str(step)) == described(model)
    records = [
        record
        for found in reader.Store(GOLDEN / "compacted").chunks.values()
        for _, record, _ in found
    ]
    assert {2, 3} <= {record[6] for record in records}


@pytest.mark.parametrize("step", PATCHED_STEPS)
def test_a_patched_golden_store_is_read(step: int) -> None:
    model = {f"model/{name}": value for name, value in patched_state(step)["model"].items()}
    assert read(GOLDEN / "patched", str(step)) == described(model)
    found = reader.Store(GOLDEN / "patched").chunks.values()
    assert 4 in {record[6] for each in found for _, record, _ in each}


@pytest.mark.parametrize("step", ROUNDED_STEPS)
def test_a_golden_store_of_rounded_masters_is_read(step: int) -> None:
    leaves = {
        f"{key}/{name}": value
        for key, its in rounded_state(step).items()
        for name, value in its.items()
    }
    assert read(GOLDEN / "rounded", str(step)) == described(leaves)
    found = reader.Store(GOLDEN / "rounded").chunks.values()
    stored = [file.read_bytes()[r[2] :] for each in found for file, r, _ in each if r[6] == 4]
    assert sorted(patch[96] for patch in stored) == [1, 1, 2]
    assert {any(patch[64:96]) for patch in stored} == {False, True}


def test_plain_values_of_a_golden_store_are_read() -> None:
    store = reader.Store(GOLDEN / "plain")
    leaves = store.leaves(store.find("2"))
    assert [leaf["kinds"] for leaf in leaves.values()] == [*["plain"] * 3, "value", "value"]
    tag, *blocks = json.loads(store.read(leaves["log/records"]))
    assert tag == "records"
    assert [step for _, (_, *steps), *_ in blocks for step in steps] == [*range(1032)]
    assert {tuple(keys) for keys, *_ in blocks} == {("list", "step", "loss", "ü")}
    tag, *blocks = json.loads(store.read(leaves["log/numbers"]))
    items = {
        key: value
        for (_, *keys), (_, *found) in blocks
        for key, value in zip(keys, found, strict=True)
    }
    assert (tag, items) == ("items", plain_state(2)["log"]["numbers"])


def test_leaves_of_chunks_that_taper_off_are_read() -> None:
    store = reader.Store(GOLDEN / "grown")
    leaves = store.leaves(store.find("2"))
    _, *blocks = json.loads(store.read(leaves["log/records"]))
    assert [step for _, (_, *steps), *_ in blocks for step in steps] == [*range(1032)]
    assert [len(steps) for _, steps, *_ in blocks] == [*[129] * 8, 9]
    tag, (table, width, _) = json.loads(store.read(leaves["ids"]))
    assert (tag, table, width) == ("set", "table", 4)


def test_tags_of_a_golden_store_are_resolved() -> None:
    store = reader.Store(GOLDEN / "raw")
    assert {tag: store.commits[store.find(tag)]["step"] for tag in TAGS} == TAGS
    assert store.commits[store.find("latest")]["step"] == 3


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_dtype_is_read(codec: str, tmp_path: Path) -> None:
    shapes = {
        "scalar": (),
        "empty": (0, 3),
        "inline": (5,),
        "chunk": (37, 29),
        "chunks": (301, 17, 23),
    }
    wanted = {
        f"x/{dtype}.{name}": of_dtype(dtype, shape)
        for dtype in DTYPES
        for name, shape in shapes.items()
    }
    with fresh(tmp_path, codec) as store:
        store.commit({"x": {path[2:]: tensor for path, tensor in wanted.items()}}, step=1)
    assert read(tmp_path, "1") == described(wanted)


def test_values_bytes_ties_and_many_pages_are_read(tmp_path: Path) -> None:
    tied, long = torch.rand(300), random.randbytes(200_001)
    many = {f"m/{i}": torch.tensor(i) for i in range(1100)}
    wanted = {
        "s/pi": ["float", bits(3.5)],
        "s/n": 7,
        "s/yes": True,
        "s/text": "x" * 70_000,
        "s/raw": long,
        "s/small": b"ab",
        "t/a": tied,
        "t/b": tied,
        **many,
        "z/zeros": torch.zeros(2100, 64 << 10, dtype=torch.uint8),
        "z/after": torch.arange(1000),
    }
    plain = {**wanted, "s/pi": 3.5}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in plain.items():
        nested.setdefault(path[0], {})[path[2:]] = value
    with fresh(tmp_path) as store:
        store.commit(nested, step=1)
    assert read(tmp_path, "latest") == described(wanted)


def test_what_was_forgotten_tagged_and_collected_is_as_the_log_says(tmp_path: Path) -> None:
    weights = {step: torch.rand(50_000) for step in range(8)}
    with fresh(tmp_path, "zstd") as store:
        ids = [
            store.commit({"x": {"w": w, "same": torch.arange(9_000)}}, step=step).id
            for step, w in weights.items()
        ]
        store.tag("kept", 1)
        store.tag("gone", 7)
        store.untag("gone")
        store.forget([0, 2, 3])
        store.gc(force=True, grace_s=0)
        store.forget([4, 5])
        store.undelete([ids[5]])
    state = Log(open_storage(str(tmp_path)), store.id, 1).replay()
    found = reader.Store(tmp_path)
    assert {id: bool(row.soft) for id, row in state.commits.items()} == {
        id: entry["forgotten"] for id, entry in found.commits.items()
    }
    assert [step for step in range(8) if found.commits.get(ids[step], {}).get("forgotten")][-1] == 4
    assert {tag: id for tag, id in found.tags.items() if id} == dict(state.tags) == {"kept": ids[1]}
    assert found.find("latest") == ids[7]
    for step in (1, 4, 5, 6, 7):
        assert read(tmp_path, ids[step])["x/w"] == described({"": weights[step]})[""]


def test_a_twin_stands_in_for_damaged_metadata_and_other_damage_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(GOLDEN / "raw", place)
    packs = sorted(file for file in place.glob("packs/*/*-1"))
    for pack in packs:
        pack.write_bytes(bytes(len(pack.read_bytes())))
    assert read(place, "2")["step"] == 2
    for pack in place.glob("packs/*/*-0"):
        data = bytearray(pack.read_bytes())
        data[100] ^= 1
        pack.write_bytes(data)
    with pytest.raises(ValueError, match="no pack has chunk"):
        read(place, "2")


def test_a_gap_and_a_broken_chain_in_the_log_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(GOLDEN / "raw", place)
    (place / "log" / f"{3:012d}").unlink()
    with pytest.raises(ValueError, match=r"entry 3 of the log is missing; .*000000000004"):
        reader.Store(place)
    (place / "log" / f"{4:012d}").rename(place / "log" / f"{3:012d}")
    with pytest.raises(ValueError, match="entry 3"):
        reader.Store(place)


def test_the_command_of_the_reader_prints_commits_leaves_and_bytes() -> None:
    def run(*words: str) -> bytes:
        command = [sys.executable, "-W", "error", str(FILE), str(GOLDEN / "raw"), *words]
        return subprocess.run(command, capture_output=True, check=True).stdout

    assert b"main 2 best" in run()
    assert b"model/half tensor bfloat16 [90, 100]" in run("best")
    assert run("best", "model/half") == described({"": state(2)["model"]["half"]})[""][2]


def test_the_worked_example_of_the_page_is_what_the_golden_store_has() -> None:
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert text == example(), "run `python -m tests.golden.example`"
