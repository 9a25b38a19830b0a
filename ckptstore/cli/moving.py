"""`ckptstore push`, `pull`, `clone`, `import` and `export`: commits to and from other stores and
formats."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from ckptstore.cli.call import Answer, Call, Exit, NoStore, UsageError
from ckptstore.cli.commits import short
from ckptstore.cli.screen import fields_of, to_json
from ckptstore.core.config import default_threads
from ckptstore.core.text import bytes_text, count_text
from ckptstore.errors import NotFound
from ckptstore.maintenance.mirror import MirrorOptions, mirror
from ckptstore.maintenance.mirror_plan import choose, other_end
from ckptstore.repository.resolve_ref import find_commit
from ckptstore.repository.store_handle import StoreHandle


def push(call: Call) -> Answer:
    args = call.args
    source = call.open(*args.refs)
    target = other_end(args.other, like=source if args.create else None, index=args.to_index)
    return _mirror(call, source, _opened(call, target, "; --create makes it"))


def pull(call: Call) -> Answer:
    args = call.args
    source = _opened(call, other_end(args.other, read_only=True, index=args.from_index))
    return _mirror(call, source, call.open())


def clone(call: Call) -> Answer:
    args = call.args
    args.refs, args.ancestors, args.tags, args.force, args.dry_run = (), False, True, False, False
    source = _opened(call, other_end(args.other, read_only=True, index=args.from_index))
    target = other_end(args.to, like=source, index=args.to_index)
    return _mirror(call, source, _opened(call, target))


def _opened(call: Call, end: AbstractContextManager[StoreHandle], advice: str = "") -> StoreHandle:
    """The other store, open for the rest of the call."""
    try:
        return call.stack.enter_context(end)
    except NotFound as error:
        raise NoStore(f"{error}{advice}") from error


def _mirror(call: Call, source: StoreHandle, target: StoreHandle) -> Answer:
    args = call.args
    threads = call.threads(default_threads())
    wanted = choose(source, args.refs, run=args.run, ancestors=args.ancestors)
    options = MirrorOptions(args.tags, args.force, args.verify)
    with call.screen.progress() as shown:
        done = mirror(
            source, target, wanted, options, threads, dry_run=args.dry_run, progress=shown
        )
    ends = {"source": source.url, "target": target.url, "dry_run": args.dry_run}
    page = [f"{source.url} → {target.url}", done]
    code = Exit.DAMAGED if done.damaged else Exit.OK
    document = {
        **ends,
        "plan": {**to_json(done.plan), "load": done.load},
        **fields_of(done, "sent", "chunks", "raw_bytes", "stored_bytes"),
        "damaged": [{"commit": commit, "why": why} for commit, why in done.damaged],
    }
    return Answer(document, page, done.problems, code)


def import_files(call: Call) -> Answer:
    args = call.args
    metrics = _metrics(args.metric)
    handle = call.open()
    from ckptstore.core.settings import Settings
    from ckptstore.interop.formats import Labels, import_path
    from ckptstore.store import Store

    store = call.stack.enter_context(Store(handle, Settings.of(run=args.run)))
    with call.screen.progress(f"importing {args.path}"):
        labels = Labels(args.step, tuple(args.tag), args.message, metrics)
        made = import_path(store, args.path, labels, allow_pickle=args.allow_pickle)
    leaves = len(made.leaves())
    document = {
        "commit": made.id,
        **fields_of(made, "run", "step", "tags", "logical_bytes", "new_bytes"),
        "leaves": leaves,
    }
    size = f"{bytes_text(made.logical_bytes)}, {bytes_text(made.new_bytes)} of them new"
    counted = count_text(leaves, "leaf", "leaves")
    return Answer(document, [f"{short(made.id)} of run {made.run}: {counted}, {size}"])


def _metrics(texts: Sequence[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError as error:
            raise UsageError(
                f"{text!r} is not a metric: wanted NAME=VALUE such as loss=2.31", "ckptstore import"
            ) from error
        if metrics.setdefault(name, value) != value:
            raise UsageError(
                f"two values for the metric {name!r}, {metrics[name]} and {value}; it takes one",
                "ckptstore import",
            )
    return metrics


def export_files(call: Call) -> Answer:
    args = call.args
    handle = call.open(args.ref)
    from ckptstore.core.settings import Settings
    from ckptstore.interop.formats import export
    from ckptstore.store import Store

    found = find_commit(handle, args.ref, args.run)
    store = call.stack.enter_context(Store(handle, Settings.of()))
    with call.screen.progress(f"exporting {short(found.id)}"):
        done = export(
            store.checkout(found.id),
            args.path,
            format=args.format,
            select=args.select or "*",
            allow_pickle=args.allow_pickle,
        )
    files = f"{count_text(len(done.files), 'file')}, {bytes_text(done.bytes)}"
    page = [f"{short(found.id)} to {args.path} as {done.format}: {files}"]
    if done.left_out:
        page.append(f"{done.left_out} other leaves are not in it")
    written = fields_of(done, "format", "files", "bytes", "left_out")
    return Answer({"commit": found.id, **written}, page)
