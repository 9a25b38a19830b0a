"""The public names of `Store` and `Snapshot`: what a trainer uses, and nothing else."""

from inspect import getdoc, signature
from pathlib import Path

import pytest

import ckptstore
from ckptstore import Async, InvalidInput, Snapshot, Storage, Store

MAINTENANCE = {
    *(
        "chunk_bytes",
        "compact",
        "doctor",
        "forecast",
        "forget",
        "forgotten",
        "fsck",
        "on",
        "gc",
        "history",
        "mirror",
        "pull",
    ),
    *("push", "reindex", "release", "repair", "sessions", "undelete", "usage"),
}
TRAINING = {
    *("adopt", "checkout", "close", "commit", "commit_async", "committing", "diff", "every"),
    *(
        "flush_mirror",
        "follow",
        "health",
        "id",
        "log",
        "resume",
        "runs",
        "staging",
        "tag",
        "tags",
        "untag",
        "url",
    ),
    "worker_pid",
}
READING = {
    *("close", "content_id", "keys", "layout", "leaves", "links", "logical_bytes", "materialize"),
    *("message", "metrics", "new_bytes", "numbered", "of_rank", "only", "open", "parents"),
    *("read", "read_into", "restore", "run", "state_dict", "step", "time", "verify"),
}
DOCUMENTED = (
    *(Store.commit, Store.commit_async, Store.resume, Store.checkout, Store.gc, Store.forget),
    *(Store.follow, Store.push, Store.fsck, Store.repair, Snapshot.restore),
)


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Store, MAINTENANCE | TRAINING), (Snapshot, READING)],
    ids=["Store", "Snapshot"],
)
def test_a_class_shows_exactly_its_public_names(kind: type, names: set[str]) -> None:
    assert {name for name in dir(kind) if not name.startswith("_")} == names


@pytest.mark.parametrize(("name", "instead"), [("save", "commit"), ("load", "restore")])
def test_the_words_of_torch_lead_to_ours(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; .*\.{instead}\(app_state"):
        getattr(ckptstore, name)


@pytest.mark.parametrize("method", DOCUMENTED, ids=lambda method: method.__name__)
def test_a_docstring_has_arguments_errors_and_an_example(method: object) -> None:
    text = getdoc(method) or ""
    assert all(f"\n{part}:\n" in text for part in ("Args", "Raises", "Example"))


@pytest.mark.parametrize(
    "call",
    [ckptstore.open, Store.commit, Store.commit_async, Store.resume, Snapshot.restore],
    ids=lambda call: call.__name__,
)
def test_a_call_takes_at_most_nine_arguments(call: object) -> None:
    """Besides what a commit makes of its tensors on the way, and what a restore does about a commit
    that does not fit or is damaged."""
    aside = {"self", "unnamed", "cast", "stats", "mismatched", "atomic"}
    assert len(set(signature(call).parameters) - aside) <= 9  # type: ignore[arg-type]


def test_what_holds_for_a_store_is_refused_for_one_commit(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store", storage=Storage(codec="zstd")) as store:
        with pytest.raises(InvalidInput, match=r"executor holds for a store.*ckptstore\.open"):
            store.commit_async({"a": 1}, background=Async(executor="process"))
        assert store.log() == []


def test_a_store_gives_its_background_commits_their_defaults(tmp_path: Path) -> None:
    seen: list[str] = []
    watching = Async(on_progress=lambda progress: seen.append(progress.milestone))
    with ckptstore.open(tmp_path / "store", background=watching) as store:
        store.commit_async({"a": 1}).wait()
        told = len(seen)
        store.commit_async({"a": 2}, background=Async()).wait()
    assert told and len(seen) == told
