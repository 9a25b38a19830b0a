"""Arguments of a wrong type or size get an error of ours, in words; nothing is changed, and no
limit is left out."""

import re
from collections.abc import Callable
from dataclasses import is_dataclass
from inspect import getmembers, isclass, isfunction, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import Async, KeepBest, Snapshot, Store
from ckptstore.core.config import MESSAGE_BYTES_MAX, METRIC_NAME_BYTES_MAX, METRICS_MAX, TAGS_MAX
from ckptstore.core.public_calls import booleans_of
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugins.schedule.schedule import Schedule

LABELS: dict[str, dict[str, Any]] = {
    "metrics are a number": {"metrics": 5},
    "metrics are a list": {"metrics": [1]},
    "metrics are text": {"metrics": "loss"},
    "a metric's name is no text": {"metrics": {5: 1.0}},
    "a metric's name is a surrogate": {"metrics": {"\ud800": 1.0}},
    "a metric's name is long": {"metrics": {"é" * (METRIC_NAME_BYTES_MAX // 2 + 1): 1.0}},
    "too many metrics": {"metrics": {f"m{n}": 0.0 for n in range(METRICS_MAX + 1)}},
    "a tag is a number": {"tag": 5},
    "a tag is bytes": {"tag": b"ab"},
    "a tag is long": {"tag": "x" * 10**6},
    "too many tags": {"tag": [f"t{n}" for n in range(TAGS_MAX + 1)]},
    "a message is bytes": {"message": b"x"},
    "a message is a surrogate": {"message": "\ud800"},
    "a message is long": {"message": "é" * (MESSAGE_BYTES_MAX // 2) + "x"},
}

CALLS: dict[str, Callable[[Store, Any], object]] = {
    "read(5)": lambda store, snapshot: snapshot.read(5),
    "read(None)": lambda store, snapshot: snapshot.read(None),
    "read with NUL": lambda store, snapshot: snapshot.read("m/t\0"),
    "a region of text": lambda store, snapshot: snapshot.read("m/t", "x"),
    "open(5)": lambda store, snapshot: snapshot.open(5),
    "read_into(path, tensor)": lambda store, snapshot: snapshot.read_into("m/t", torch.zeros(2, 3)),
    "read_into(tensor, tensor)": lambda store, snapshot: snapshot.read_into(
        torch.zeros(2, 3), torch.zeros(1)
    ),
    "only(text)": lambda store, snapshot: snapshot.only("m"),
    "only(5)": lambda store, snapshot: snapshot.only(5),
    "leaves(5)": lambda store, snapshot: snapshot.leaves(5),
    "restore(select=5)": lambda store, snapshot: snapshot.restore({"m": {}}, select=5),
    "checkout(2**200)": lambda store, snapshot: store.checkout(2**200),
    "checkout(-2**200)": lambda store, snapshot: store.checkout(-(2**200)),
    "checkout(2**63)": lambda store, snapshot: store.checkout(2**63),
    "checkout(str(2**200))": lambda store, snapshot: store.checkout(str(2**200)),
    "checkout with NUL": lambda store, snapshot: store.checkout("best:\0"),
    "checkout of a surrogate": lambda store, snapshot: store.checkout("best:\ud800"),
    "tag of 2**200": lambda store, snapshot: store.tag("a", 2**200),
    # a mistake that is made
    "log of text": lambda store, snapshot: store.log("x"),  # type: ignore[arg-type]
    "fsck(read_data=True)": lambda store, snapshot: store.fsck(
        read_data=True  # type: ignore[arg-type]
    ),
    "fsck(read_data='')": lambda store, snapshot: store.fsck(read_data=""),
    "repair(read_data=5)": lambda store, snapshot: store.repair(
        read_data=5  # type: ignore[arg-type]
    ),
    "log(-1)": lambda store, snapshot: store.log(-1),
    "log(2**70)": lambda store, snapshot: store.log(2**70),
    # a mistake that is made
    "log of a run 5": lambda store, snapshot: store.log(run=5),  # type: ignore[arg-type]
    "open a place with NUL": lambda store, snapshot: ckptstore.open("a\0b", create=False),
    # a mistake that is made
    "open a number": lambda store, snapshot: ckptstore.open(5),  # type: ignore[arg-type]
    "open a surrogate": lambda store, snapshot: ckptstore.open("/tmp/\ud800x", create=False),
    "clone to NUL": lambda store, snapshot: ckptstore.clone(store.url, "a\0b"),
}

OWNERS = (Store, Snapshot, ckptstore.PendingCommit, Schedule)

PUBLIC: list[tuple[type | None, Callable[..., Any]]] = [
    *(
        (owner, method)
        for owner in OWNERS
        for name, method in getmembers(owner, isfunction)
        if not name.startswith("_") or name == "__call__"
    ),
    *(
        (None, found.__init__ if isclass(found) else found)
        for found in (getattr(ckptstore, name) for name in ckptstore.__all__)
        if isfunction(found) or (isclass(found) and is_dataclass(found))
    ),
]
"""Every method and function that users call, and what makes each dataclass that they give."""


@pytest.mark.parametrize("what", LABELS)
@pytest.mark.parametrize("way", ["commit", "commit_async"])
def test_what_is_said_of_a_commit_is_checked_and_bounded(
    way: str, what: str, tmp_path: Path
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        with pytest.raises(InvalidInput) as raised:
            getattr(store, way)({"a": 1}, **LABELS[what])
        assert len(str(raised.value)) < 500
        assert store.log() == []


def test_all_that_may_be_said_of_a_commit_makes_a_small_entry(tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "message": "x" * MESSAGE_BYTES_MAX,
        "metrics": {f"{n:0{METRIC_NAME_BYTES_MAX}}": n / 7 for n in range(METRICS_MAX)},
        "tag": [f"{n:0200}x"[-200:] for n in range(TAGS_MAX)],
    }
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"a": 1}, **said)
        assert snapshot.message == said["message"] and snapshot.metrics == said["metrics"]
        assert sorted(store.tags()) == sorted(said["tag"])
    assert max(path.stat().st_size for path in (tmp_path / "store" / "log").iterdir()) < 256 << 10


def test_no_tag_may_be_said_as_none(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"a": 1}, tag=None)
        store.commit_async({"a": 2}, tag=None).wait()
        assert store.tags() == {} and len(store.log()) == 2


@pytest.mark.parametrize("what", CALLS)
def test_a_mistaken_call_gets_an_error_of_ours(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        snapshot = store.commit({"m": {"t": torch.arange(6.0).view(2, 3), "v": 5}}, step=1)
        with pytest.raises((InvalidInput, NotFound)) as raised:
            CALLS[what](store, snapshot)
        assert len(str(raised.value)) < 500
        assert not caplog.records  # no catalog was taken for damaged
        assert [info.id for info in store.log()] == [snapshot.id]


@pytest.mark.parametrize("way", ["commit", "commit_async"])
@pytest.mark.parametrize(
    ("value", "name"), [(100, "step=100"), ("best", "tag='best'"), ({"loss": 1.0}, "metrics={")]
)
def test_an_argument_without_its_name_is_told_which_it_may_be(
    way: str, value: object, name: str, tmp_path: Path
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        with pytest.raises(InvalidInput, match=re.escape(f"{way}(app_state, {name}")):
            getattr(store, way)({"a": 1}, value)
        assert store.log() == []


def test_an_argument_of_open_beside_its_group_is_told_where_it_belongs(tmp_path: Path) -> None:
    for name, group in (
        ("codec", "storage=Storage"),
        ("chunk_bytes", "storage=Storage"),
        ("executor", "background=Async"),
    ):
        wrong: dict[str, Any] = {name: 1}
        with pytest.raises(InvalidInput, match=re.escape(f"open(…, {group}({name}=…))")):
            ckptstore.open(tmp_path / "store", **wrong)
    nothing: dict[str, Any] = {"codek": 1}
    with pytest.raises(TypeError, match="no argument 'codek'"):
        ckptstore.open(tmp_path / "store", **nothing)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("way", ["commit", "commit_async"])
def test_a_commit_that_only_its_id_names_is_hinted_at_once(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        getattr(store, way)({"a": 1}, step=1)
        getattr(store, way)({"a": 2}, tag="final")
        assert caplog.messages == []
        getattr(store, way)({"a": 3})
        getattr(store, way)({"a": 4})
        (hint,) = caplog.messages
        assert hint.startswith("a commit of run main has neither step nor tag")


BOOLEANS = [
    (owner, function, boolean) for owner, function in PUBLIC for boolean in booleans_of(function)
]


def test_every_boolean_of_a_public_call_is_given_by_name() -> None:
    """`booleans_of` refuses any other. No annotation is text, which it would not see."""
    assert len(BOOLEANS) > 40
    for _, function in PUBLIC:
        for parameter in signature(function).parameters.values():
            assert parameter.annotation not in ("bool", "bool | None")


@pytest.mark.parametrize("value", ["min", "false", "no", "", 1, 0, 2.0, [], torch.ones(2)])
def test_no_text_and_no_number_is_true(value: object) -> None:
    for _, function, boolean in BOOLEANS:
        with pytest.raises(InvalidInput, match=f"{boolean.name} is .*; wanted True or False"):
            function(**{boolean.name: value})


def test_the_booleans_of_numpy_are_booleans() -> None:
    assert KeepBest("loss", maximize=np.True_).maximize
    assert Async(trust_version=False) == Async()
