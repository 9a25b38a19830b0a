"""`adopt` and `materialize`: checkpoint directories in, and out again."""

import os
from pathlib import Path

from ckptstore.cli.call import Answer, Call
from ckptstore.cli.commits import commit_text, find_proven, reader_of, short, size_text
from ckptstore.cli.labels import links_of, metrics_of
from ckptstore.cli.screen import fields_of
from ckptstore.errors import InvalidInput
from ckptstore.plugin.model import run_or_default, threads_or_default
from ckptstore.plugin.pointers import HOLLOW_POINTER, is_pointer
from ckptstore.plugin.text import bytes_text, count_text


def adopt(call: Call) -> Answer:
    args = call.args
    label = {
        **fields_of(args, "step", "tag", "message"),
        "metrics": metrics_of(args.metric),
        "links": links_of(args.link),
    }
    handle = call.open()
    run, place = run_or_default(args.run), Path(args.directory).absolute()
    with call.screen.progress(f"adopting {args.directory}"):
        # One that was hollow, or becomes so, takes the way of trainers, whose objects are slow to
        # import.
        if args.hollow or os.path.lexists(place / HOLLOW_POINTER):
            from ckptstore.plugin.snapshots import contents_of

            made = call.training_store(handle, run).adopt(place, hollow=args.hollow, **label)
            found, tags = contents_of(made), made.tags
        else:
            from ckptstore.plugin.reading import CommitContents
            from ckptstore.plugin.writing import label_of
            from ckptstore.plugins.adopt.commit_directory import commit_directory

            reader = reader_of(call, handle, threads_or_default())
            whole = commit_directory(handle, reader.threads, place, label_of(run, **label))
            found = CommitContents(reader, whole.id, whole.document)
            tags = whole.document.tags
    tensors = sum(kind == "tensor" for tree in found.trees.values() for kind in tree.schema.kinds)
    said = found.document
    document = {
        "commit": found.commit,
        **fields_of(said, "run", "step"),
        "tags": tags,
        **fields_of(said, "logical_bytes", "new_bytes"),
        "tensors": tensors,
        "hollow": args.hollow,
    }
    small = [f"{args.directory} is hollow now"] if args.hollow else []
    counted = count_text(tensors, "tensor")
    text = f"{short(found.commit)} of run {said.run}: {counted} in files, {size_text(said)}"
    return Answer(document, [text, *small])


def materialize(call: Call) -> Answer:
    args = call.args
    handle = call.open(args.ref)
    if not (directory := args.directory or (args.ref if is_pointer(args.ref) else "")):
        raise InvalidInput(
            f"{args.ref} is no hollow directory: name the directory to write, "
            f"`ckptstore materialize {args.ref} DIR`"
        )
    from ckptstore.plugin.reading import contents_at
    from ckptstore.plugin.work import reads_at_once
    from ckptstore.plugins.adopt.materializing import materialize as write_directory

    found = find_proven(call, handle, args.ref)
    slow, threads = handle.storage.capabilities.slow_requests, threads_or_default()
    reader = reader_of(call, handle, reads_at_once(threads) if slow else threads)
    contents = contents_at(handle, reader, found)
    with call.screen.progress(f"writing {short(found.id)}"):
        done = write_directory(contents, found.id, Path(directory), args.select)
    links = f", {count_text(done.links, 'link')}" if done.links else ""
    counted = f"{count_text(done.files, 'file')}{links}, {bytes_text(done.bytes)}"
    document = {"commit": found.id, **fields_of(done, "path", "files", "folders", "links", "bytes")}
    return Answer(document, [f"{commit_text(found)} to {directory}: {counted}"])
