"""Which commits refs name: by the log, which is checked; the catalog only knows best what to say about a ref that names none."""

from ckptstore.core.refs import parse_ref
from ckptstore.engine.opening import Opening
from ckptstore.errors import Corrupt
from ckptstore.history.resolve import Resolved, resolve


def find_commit(opening: Opening, ref: str | int, run: str | None) -> Resolved:
    """The commit that `ref` names, in `run` where it names none itself, in all runs if that is None.

    Raises `NotFound` naming near ones, `InvalidInput` for what is no ref or the beginning of several ids.
    """
    parsed = parse_ref(ref)
    if found := resolve(opening.log.replay(), parsed, run):
        return found
    wrong = opening.queries().resolve(parsed, run)
    raise Corrupt(f"the catalog takes {ref!r} for commit {wrong[:12]}, which the log denies; run `ckptstore reindex`")
