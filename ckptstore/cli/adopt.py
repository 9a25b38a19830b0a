"""`adopt` and `materialize`: checkpoint directories in, and out again."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.cli.call import Answer, Call
from ckptstore.cli.commits import commit_text, find_proven, short, size_text
from ckptstore.cli.labels import links_of, metrics_of
from ckptstore.cli.screen import fields_of
from ckptstore.core.environment import run_or_default, threads_or_default
from ckptstore.core.text import bytes_text, count_text
from ckptstore.errors import InvalidInput
from ckptstore.objects.pointer_files import HOLLOW_POINTER, is_pointer
from ckptstore.repository.store_handle import StoreHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptstore.commit.commit_metadata import CommitMetadata
    from ckptstore.contents import CommitContents


def adopt(call: Call) -> Answer:
    args = call.args
    metrics = metrics_of(args.metric)
    links = links_of(args.link)
    handle = call.open()
    from ckptstore.commit.commit_metadata import label_of

    run = run_or_default(args.run)
    label = partial(label_of, run, args.step, args.tag, args.message, metrics, links)
    place = Path(args.directory).absolute()
    with call.screen.progress(f"adopting {args.directory}"):
        # One that was hollow, or becomes so, takes the way of trainers, whose objects are slow to
        # import.
        if args.hollow or os.path.lexists(place / HOLLOW_POINTER):
            found, tags = _adopt_by_store(call, handle, place, run, label, hollow=args.hollow)
        else:
            found, tags = _adopt(call, handle, place, label())
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


def _adopt(
    call: Call, handle: StoreHandle, place: Path, label: "CommitMetadata"
) -> tuple["CommitContents", tuple[str, ...]]:
    """Commit a directory that stays whole; its contents and its tags."""
    from ckptstore.adopt.commit_directory import commit_directory
    from ckptstore.contents import CommitContents
    from ckptstore.restore.reader import Reader

    threads = call.threads(threads_or_default())
    made = commit_directory(handle, threads, place, label)
    reader = Reader(handle.config, handle.objects, threads)
    return CommitContents(reader, made.id, made.document), made.document.tags


def _adopt_by_store(
    call: Call,
    handle: StoreHandle,
    place: Path,
    run: str,
    label: "Callable[[], CommitMetadata]",
    *,
    hollow: bool,
) -> tuple["CommitContents", tuple[str, ...]]:
    """Commit a directory that is hollow or becomes so; its contents and its tags."""
    from ckptstore.adoption import adopt as adopt_in
    from ckptstore.snapshot import contents_of
    from ckptstore.store import internals_of

    store = call.training_store(handle, run)
    made = adopt_in(internals_of(store), place, label, hollow=hollow)
    return contents_of(made), made.tags


def materialize(call: Call) -> Answer:
    args = call.args
    handle = call.open(args.ref)
    if not (directory := args.directory or (args.ref if is_pointer(args.ref) else "")):
        raise InvalidInput(
            f"{args.ref} is no hollow directory: name the directory to write, "
            f"`ckptstore materialize {args.ref} DIR`"
        )
    from ckptstore.adopt.materializing import materialize as write_directory
    from ckptstore.contents import contents_at
    from ckptstore.repository.thread_pool import reads_at_once
    from ckptstore.restore.reader import Reader

    found = find_proven(call, handle, args.ref)
    slow, threads = handle.storage.capabilities.slow_requests, threads_or_default()
    pool = call.threads(reads_at_once(threads) if slow else threads)
    reader = Reader(handle.config, handle.objects, pool)
    contents = contents_at(handle, reader, found)
    with call.screen.progress(f"writing {short(found.id)}"):
        done = write_directory(contents, found.id, Path(directory), args.select)
    links = f", {count_text(done.links, 'link')}" if done.links else ""
    counted = f"{count_text(done.files, 'file')}{links}, {bytes_text(done.bytes)}"
    document = {"commit": found.id, **fields_of(done, "path", "files", "folders", "links", "bytes")}
    return Answer(document, [f"{commit_text(found)} to {directory}: {counted}"])
