"""`adopt` and `materialize`: checkpoint directories in, and out again."""

from collections.abc import Sequence
from pathlib import Path

from ckptstore.cli.call import Answer, Call, UsageError
from ckptstore.cli.commits import commit_text, find_proven, short
from ckptstore.cli.maintain import metrics_of
from ckptstore.cli.screen import fields_of
from ckptstore.core.text import bytes_text, count_text
from ckptstore.errors import InvalidInput
from ckptstore.objects.pointer_files import is_pointer


def adopt(call: Call) -> Answer:
    args = call.args
    metrics = metrics_of(args.metric, "ckptstore adopt")
    links = _links_of(args.link)
    handle = call.open()
    from ckptstore.core.settings import Settings
    from ckptstore.store import Store

    store = call.stack.enter_context(Store(handle, Settings.of(run=args.run)))
    with call.screen.progress(f"adopting {args.directory}"):
        made = store.adopt(
            args.directory,
            hollow=args.hollow,
            step=args.step,
            tag=args.tag,
            message=args.message,
            metrics=metrics,
            links=links,
        )
    tensors = sum(leaf.kind == "tensor" for leaf in made.leaves())
    document = {
        "commit": made.id,
        **fields_of(made, "run", "step", "tags", "logical_bytes", "new_bytes"),
        "tensors": tensors,
        "hollow": args.hollow,
    }
    size = f"{bytes_text(made.logical_bytes)}, {bytes_text(made.new_bytes)} of them new"
    counted = count_text(tensors, "tensor")
    small = [f"{args.directory} is hollow now"] if args.hollow else []
    text = f"{short(made.id)} of run {made.run}: {counted} in files, {size}"
    return Answer(document, [text, *small])


def _links_of(texts: Sequence[str]) -> dict[str, str]:
    """The links that `--link` gives."""
    links: dict[str, str] = {}
    for text in texts:
        name, found, link = text.partition("=")
        if not (name and found and link):
            raise UsageError(
                f"{text!r} is not a link: wanted NAME=TEXT such as wandb=https://…",
                "ckptstore adopt",
            )
        if links.setdefault(name, link) != link:
            raise UsageError(f"two links are called {name!r}; each needs a name", "ckptstore adopt")
    return links


def materialize(call: Call) -> Answer:
    args = call.args
    handle = call.open(args.ref)
    if not (directory := args.directory or (args.ref if is_pointer(args.ref) else "")):
        raise InvalidInput(
            f"{args.ref} is no hollow directory: name the directory to write, "
            f"`ckptstore materialize {args.ref} DIR`"
        )
    from ckptstore.core.settings import Settings
    from ckptstore.store import Store

    found = find_proven(call, handle, args.ref)
    store = call.stack.enter_context(Store(handle, Settings.of()))
    with call.screen.progress(f"writing {short(found.id)}"):
        done = store.checkout(found.id).materialize(Path(directory), select=args.select)
    counted = [
        count_text(done.files, "file"),
        *([count_text(done.links, "link")] if done.links else []),
        bytes_text(done.bytes),
    ]
    document = {"commit": found.id, **fields_of(done, "path", "files", "folders", "links", "bytes")}
    return Answer(document, [f"{commit_text(found)} to {directory}: {', '.join(counted)}"])
