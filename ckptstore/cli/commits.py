"""What commands read of a commit: its leaves from the catalog, or whole trees from the store; and
how they write it."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptstore.cli.call import Call
from ckptstore.cli.screen import fields_of
from ckptstore.plugin.catalogs import Queries
from ckptstore.plugin.handles import (
    StoreHandle,
    decode_document,
    decode_schema,
    find_commit,
    trained_last,
)
from ckptstore.plugin.model import (
    CommitDocument,
    CommitId,
    CommitInfo,
    Schema,
    StoreConfig,
    document_key,
    parse_chunk_id,
)
from ckptstore.plugin.text import ID_DIGITS, bytes_text, exact_text

if TYPE_CHECKING:
    from ckptstore import Snapshot
    from ckptstore.plugin.reading import Reader

_STEP = re.compile(r"[0-9]{1,18}(?=~|$)")


def short(commit: CommitId) -> str:
    """The digits of an id that people read; enough for a ref."""
    return commit[:ID_DIGITS]


def step_text(info: CommitInfo) -> str:
    """`8f3a1c9e02b7 (step 100)`."""
    return short(info.id) if info.step is None else f"{short(info.id)} (step {info.step})"


def commit_text(info: CommitInfo) -> str:
    """`8f3a1c9e02b7 (step 100) of run main`."""
    return f"{step_text(info)} of run {info.run}"


def find_proven(call: Call, store: StoreHandle, ref: str) -> CommitInfo:
    """The commit that `ref` names by the log, for what restores, changes, signs or verifies."""
    found = find_commit(store, ref, call.args.run)
    tell_run(call, store.queries(), ref)
    return store.queries().commit(found.id)


def find_in_one_run(call: Call, store: StoreHandle, refs: Sequence[str]) -> list[CommitInfo]:
    """The commits that `refs` name by the log, for what is about one run: that of --run, else the
    one that was trained last."""
    queries = store.queries()
    run = call.args.run or trained_last(queries)
    return [queries.commit(find_commit(store, ref, run).id) for ref in refs]


def tell_run(call: Call, queries: Queries, ref: str) -> None:
    """Say on standard error which commit a step is, if several runs have that step and none was
    chosen."""
    named = _STEP.match(ref)
    if call.args.run is not None or not named:
        return
    step = int(named[0])
    runs = [info.run for info in queries.runs() if queries.newest(info.run, step)]
    newest = queries.newest(None, step)
    if len(runs) > 1 and newest:
        chosen, some = queries.commit(newest).run, ", ".join(sorted(runs)[:5])
        call.screen.complain(
            f"step {step} is in {len(runs)} runs ({some}{', …' if len(runs) > 5 else ''}); the "
            f"newest is taken, {chosen}@{step}: --run or RUN@{step} takes another"
        )


def size_text(made: "CommitDocument | Snapshot") -> str:
    """The size of a commit that a command has made."""
    return f"{bytes_text(made.logical_bytes)}, {bytes_text(made.new_bytes)} of them new"


def config_text(config: StoreConfig) -> str:
    return f"chunks of {bytes_text(config.chunk_bytes)}, codec {config.codec}"


def first_line(message: str) -> str:
    """The part of a message that a table shows."""
    line, _, more = message.strip().partition("\n")
    return f"{line} …" if more else line


def commit_document(info: CommitInfo) -> dict[str, Any]:
    """One commit in JSON documents (docs/cli.md)."""
    return {
        **fields_of(info, "id", "content"),
        "entry": info.n,
        **fields_of(info, "session", "run", "step", "message"),
        "time": exact_text(info.time_ns),
        **fields_of(info, "time_ns", "parents", "metrics", "tags", "logical_bytes", "new_bytes"),
        **fields_of(info, "leaves", "forgotten", "thinned", "cast"),
    }


def document_of(store: StoreHandle, info: CommitInfo) -> CommitDocument:
    """The document of a commit, verified. Raises `Corrupt`, or `NotFound` if it was deleted."""
    return decode_document(store.storage.read(document_key(info.session, info.id)), info.id)


def reader_of(call: Call, store: StoreHandle, threads: int = 1) -> "Reader":
    """A reader of commits, for the rest of the call."""
    from ckptstore.plugin.reading import Reader

    return Reader(store.config, store.objects, call.threads(threads))


def schemas_of(store: StoreHandle, queries: Queries, info: CommitInfo) -> dict[str, Schema]:
    """The schema of each tree by its name. The catalog has them; one that it lacks is read from the
    packs."""
    return {
        name: queries.schema(schema)
        or decode_schema(store.objects.read_metadata(parse_chunk_id(schema)))
        for name, schema in sorted(info.schemas.items())
    }
