"""The public names of `Store` and `Snapshot`: what a trainer uses, and nothing else."""

import pytest

from ckptstore import Snapshot, Store

MAINTENANCE = {
    *("chunk_bytes", "doctor", "forget", "fsck", "gc", "mirror", "pull", "push", "reindex"),
    *("repair", "sessions", "undelete", "usage"),
}
TRAINING = {
    *("checkout", "close", "commit", "commit_async", "committing", "diff", "every"),
    *("flush_mirror", "id", "log", "resume", "runs", "staging", "tag", "tags", "untag", "url"),
    "worker_pid",
}
READING = {
    *("close", "content_id", "keys", "layout", "leaves", "logical_bytes", "message", "metrics"),
    *("new_bytes", "numbered", "of_rank", "only", "open", "parents", "read", "read_into"),
    *("restore", "run", "state_dict", "step", "time", "verify"),
}
DOCUMENTED = (
    *(Store.commit, Store.commit_async, Store.resume, Store.checkout, Store.gc, Store.forget),
    *(Store.push, Store.fsck, Store.repair, Snapshot.restore),
)


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Store, MAINTENANCE | TRAINING), (Snapshot, READING)],
    ids=["Store", "Snapshot"],
)
def test_a_class_shows_exactly_its_public_names(kind: type, names: set[str]) -> None:
    assert {name for name in dir(kind) if not name.startswith("_")} == names


@pytest.mark.parametrize("method", DOCUMENTED, ids=lambda method: method.__name__)
def test_a_docstring_has_arguments_errors_and_an_example(method: object) -> None:
    text = method.__doc__ or ""
    assert all(f"\n        {part}:\n" in text for part in ("Args", "Raises", "Example"))
