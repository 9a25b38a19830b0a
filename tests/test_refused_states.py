"""What a store refuses, and how it says so: states, labels, tags and refs that do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import InvalidInput, NotFound


def files(root: Path, folder: str) -> list[Path]:
    return sorted(p for p in (root / folder).rglob("*") if p.is_file())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("ref", "error", "says"),
    [
        (11, NotFound, "10"),
        ("god", NotFound, "good"),
        ("best:lost", NotFound, "loss"),
        ("latest~9", NotFound, "parent"),
        ("a b", InvalidInput, "no ref"),
        ("nobody@1", NotFound, "main"),
        (1.5, InvalidInput, "no ref"),
    ],
)
def test_an_unknown_ref_names_near_ones(
    place: Path, ref: Any, error: type[Exception], says: str
) -> None:
    with ckptstore.open(place) as store:
        store.commit({"n": 1}, step=10, tag="good", metrics={"loss": 1.0})
        with pytest.raises(error, match=says):
            store.checkout(ref)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a b",
        "../x",
        "/x",
        "x/",
        "a//b",
        "latest",
        "123",
        "é",
        "x" * 201,
        "-x",
        "a\n",
        "~1",
        "a@b",
    ],
)
def test_a_tag_with_forbidden_characters_is_refused(place: Path, name: str) -> None:
    with ckptstore.open(place) as store:
        with pytest.raises(InvalidInput, match="cannot be a tag"):
            store.commit({"n": 1}, tag=name)
        assert store.log() == []


def test_a_missing_or_an_extra_leaf_is_named_and_strict_false_lists_both(place: Path) -> None:
    def model(**sizes: int) -> torch.nn.Module:
        return torch.nn.ParameterDict(
            {name: torch.full((n,), float(n)) for name, n in sizes.items()}
        )

    with ckptstore.open(place) as store:
        store.commit({"model": model(a=3, b=4), "gone": 1})
        target = {"model": model(a=3, c=5), "new": 2}
        with torch.no_grad():
            target["model"].a.zero_()
        with pytest.raises(InvalidInput) as caught:
            store.checkout().restore(target)
        assert all(path in str(caught.value) for path in ("model/b", "model/c", "new"))
        assert torch.equal(target["model"].a, torch.zeros(3))
        report = store.checkout().restore(target, strict=False)
    assert set(report.missing) == {"model/c", "new"} and set(report.unexpected) == {
        "model/b",
        "gone",
    }
    assert torch.equal(target["model"].a, torch.full((3,), 3.0)) and torch.equal(
        target["model"].c, torch.full((5,), 5.0)
    )


@pytest.mark.parametrize(
    ("tensor", "says"),
    [(torch.zeros(4), r"\[4\]"), (torch.zeros(3, dtype=torch.float64), "float64")],
)
def test_a_shape_or_dtype_that_differs_is_never_cast(
    place: Path, tensor: torch.Tensor, says: str
) -> None:
    with ckptstore.open(place) as store:
        store.commit({"model": {"a": torch.ones(3)}})
        for strict in (True, False):
            with pytest.raises(InvalidInput, match=says):
                store.checkout().restore({"model": {"a": tensor}}, strict=strict)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 1.5}, "step is 1.5"),
        ({"step": True}, "step is True"),
        ({"step": torch.tensor(1.5)}, "step is tensor"),
        ({"metrics": {"loss": "low"}}, "'loss' is 'low'"),
        ({"metrics": {"loss": torch.ones(2)}}, "'loss' is tensor"),
        ({"metrics": {1: 2.0}}, "name is 1"),
        ({"message": 5}, "message is 5"),
    ],
)
def test_a_label_that_cannot_be_is_refused(
    place: Path, arguments: dict[str, Any], says: str
) -> None:
    with ckptstore.open(place) as store, pytest.raises(InvalidInput, match=says):
        store.commit({"n": 1}, **arguments)


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), [torch.ones(2)], None])
def test_a_state_that_is_no_dict_of_names_is_refused(place: Path, given: Any) -> None:
    with ckptstore.open(place) as store:
        snapshot = store.commit({"n": 1})
        for call in (store.commit, store.commit_async, snapshot.restore, store.resume):
            with pytest.raises(InvalidInput, match="wanted a dict of names to objects"):
                call(given)


def test_what_cannot_be_stored_is_named_and_leaves_nothing(place: Path) -> None:
    with ckptstore.open(place) as store:
        with pytest.raises(InvalidInput, match="model/deep/thing"):
            store.commit({"model": {"deep": {"thing": object()}}})
        assert store.log() == [] and not files(place, "packs") and not files(place, "tmp")


def test_numbers_beyond_what_a_log_holds_are_refused_before_anything_is_written(
    place: Path,
) -> None:
    with ckptstore.open(place) as store:
        store.commit({"n": 1}, step=2**53, metrics={"loss": float("inf")})
        before = sorted(place.rglob("*"))
        with pytest.raises(
            InvalidInput, match="wanted a whole number from 0 to 9007199254740992, or None"
        ):
            store.commit({"n": 2}, step=2**53 + 1)
        with pytest.raises(InvalidInput, match=r"metric 'loss' is 10+; wanted a number"):
            store.commit({"n": 2}, metrics={"loss": 10**400})
        with pytest.raises(NotFound):
            store.checkout("latest~999999999")
        assert sorted(place.rglob("*")) == before
        assert store.checkout(2**53).state_dict() == {"n": 1}
