"""Name commits in Weights & Biases: an artifact that refers to a commit, without a copy of its
bytes (docs/trackers.md).
"""

from typing import TYPE_CHECKING, Any

from ckptstore.errors import InvalidInput, NotFound
from ckptstore.interop.fsspec import PROTOCOL, open_url, url_of
from ckptstore.plugin.snapshots import Snapshot

if TYPE_CHECKING:
    import wandb

ENTRY = "commit"
"""The name of the reference in an artifact."""


def reference(snapshot: Snapshot, name: str, *, type: str = "model") -> "wandb.Artifact":
    """An artifact that refers to a commit by its id; its metadata has step, metrics and content id.

    Commits with the same id give the same version of the artifact. Log it with `run.log_artifact`.

    Example:
        >>> run.log_artifact(reference(snap, "checkpoint"), aliases=["best"])
    """
    import wandb

    artifact = wandb.Artifact(
        name,
        type=type,
        description=snapshot.message or None,
        metadata={
            "commit": snapshot.id,
            "content": snapshot.content_id,
            "run": snapshot.run,
            "step": snapshot.step,
            "metrics": snapshot.metrics,
        },
    )
    artifact.add_reference(url_of(snapshot), name=ENTRY, checksum=False)
    return artifact


def resolve(artifact: Any, **options: Any) -> Snapshot:
    """The commit that an artifact refers to, read-only: use it as a context manager.

    Args:
        artifact: A `wandb.Artifact`, as `run.use_artifact` returns it.
        options: As in `open_url`.

    Raises:
        InvalidInput: The artifact refers to no commit.
        NotFound: There is no such store or commit here.

    Example:
        >>> with resolve(run.use_artifact("checkpoint:best")) as snap:
        ...     snap.restore({"model": model})
    """
    for entry in artifact.manifest.entries.values():
        url = entry.ref or ""
        if url.startswith(f"{PROTOCOL}://"):
            try:
                return open_url(url, **options)
            except NotFound as error:
                error.add_note(f"the artifact {artifact.name} refers to {url}")
                raise
    raise InvalidInput(
        f"the artifact {artifact.name} refers to no commit: none of its entries is a "
        f"{PROTOCOL}:// URL"
    )
