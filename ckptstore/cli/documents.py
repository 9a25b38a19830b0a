"""The shapes of the `--json` documents that several commands share (docs/cli.md): full ids, exact
integers. Pure."""

from typing import Any

from ckptstore.cli.timestamps import exact_text
from ckptstore.core.model import CommitInfo


def commit_document(info: CommitInfo) -> dict[str, Any]:
    """One commit as `log` and `show` give it."""
    return {
        "id": info.id,
        "content": info.content,
        "entry": info.n,
        "session": info.session,
        "run": info.run,
        "step": info.step,
        "message": info.message,
        "time": exact_text(info.time_ns),
        "time_ns": info.time_ns,
        "parents": list(info.parents),
        "metrics": info.metrics,
        "tags": list(info.tags),
        "logical_bytes": info.logical_bytes,
        "new_bytes": info.new_bytes,
        "leaves": info.leaves,
        "forgotten": info.forgotten,
    }
