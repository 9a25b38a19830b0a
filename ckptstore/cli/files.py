"""`ckptstore import`, `export`: commits from and to files of other formats."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptstore.cli.call import Answer, Call, UsageError
from ckptstore.cli.commits import commit_text, find_proven, reader_of, short, size_text
from ckptstore.cli.labels import metrics_of
from ckptstore.cli.screen import fields_of
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.model import CommitInfo, default_threads
from ckptstore.plugin.reading import CommitContents, contents_at
from ckptstore.plugin.text import bytes_text, count_text
from ckptstore.plugin.work import Pool

if TYPE_CHECKING:
    from ckptstore.interop.formats.new_files import Exported


def import_files(call: Call) -> Answer:
    args = call.args
    metrics = metrics_of(args.metric)
    handle = call.open()
    from ckptstore.interop.formats import Labels, import_path

    store = call.training_store(handle, args.run)
    with call.screen.progress(f"importing {args.path}"):
        labels = Labels(args.step, tuple(args.tag), args.message, metrics)
        made = import_path(store, args.path, labels, allow_pickle=args.allow_pickle)
    leaves = len(made.leaves())
    document = {
        "commit": made.id,
        **fields_of(made, "run", "step", "tags", "logical_bytes", "new_bytes"),
        "leaves": leaves,
    }
    counted = count_text(leaves, "leaf", "leaves")
    return Answer(document, [f"{short(made.id)} of run {made.run}: {counted}, {size_text(made)}"])


def export_files(call: Call) -> Answer:
    args = call.args
    handle = call.open(args.ref)
    from ckptstore.interop.formats.exports import export_contents

    found = find_proven(call, handle, args.ref)
    if args.on or args.shard_size is not None:
        return _export_shards(call, handle, found)
    contents = contents_at(handle, reader_of(call, handle, default_threads()), found)
    with call.screen.progress(f"exporting {short(found.id)}"):
        done = export_contents(
            contents,
            args.path,
            lambda: call.training_store(handle).checkout(found.id),
            format=args.format,
            select=args.select or "*",
            allow_pickle=args.allow_pickle,
        )
    keys = [] if args.select or not done.refused else _keys_with_leaves(contents)
    return _exported(call, found, done, keys)


def _keys_with_leaves(contents: CommitContents) -> list[str]:
    """The keys of a commit as its paths name them."""
    paths = (path for tree in contents.trees.values() for path in tree.schema.paths)
    return list(dict.fromkeys(path.partition("/")[0] for path in paths))


def _export_shards(call: Call, handle: StoreHandle, found: CommitInfo) -> Answer:
    """Write safetensors files by ranges, on an engine or on the threads of this host."""
    args = call.args
    if args.format not in (None, "safetensors"):
        raise UsageError("--on and --shard-size write safetensors files", "ckptstore export")
    from ckptstore.plugins.engine.consolidated import export_on

    executor = call.engine() if args.on else call.stack.enter_context(Pool(default_threads()))
    with call.screen.progress(f"exporting {short(found.id)}") as shown:
        done = export_on(
            executor,
            handle,
            found,
            args.path,
            select=args.select or "*",
            shard_bytes=args.shard_size,
            progress=shown,
        )
    return _exported(call, found, done, ())


def _exported(call: Call, found: CommitInfo, done: "Exported", keys: Sequence[str]) -> Answer:
    """What was exported; `keys` could be selected to leave out what `torch.load` refuses."""
    files = f"{count_text(len(done.files), 'file')}, {bytes_text(done.bytes)}"
    page = [f"{commit_text(found)} to {call.args.path} as {done.format}: {files}"]
    if done.left_out:
        page.append(f"{done.left_out} other leaves are not in it")
    if done.refused:
        page.append(_refused_text(done.refused, keys))
    written = fields_of(done, "format", "files", "bytes", "left_out")
    refused = [{"path": path, "class": name} for path, name in done.refused]
    return Answer({"commit": found.id, **written, "refused": refused}, page)


def _refused_text(refused: Sequence[tuple[str, str]], keys: Sequence[str]) -> str:
    """What `torch.load` refuses of an export, and the selection of `keys` that leaves it out."""
    path, name = refused[0]
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    plain = [key for key in keys if all(at.partition("/")[0] != key for at, _ in refused)]
    without = "; without it: " + " ".join(f"--select {key}" for key in plain) if plain else ""
    return (
        f"`ckptstore import` reads all of it; torch.load asks for weights_only=False because of "
        f"{path}, a {name}{more}{without}"
    )
