"""`ckptstore export`: a commit becomes a file or a directory of another format."""

from argparse import Namespace

from ckptstore.cli.exits import Exit
from ckptstore.cli.format import short
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.core.text import bytes_text, count_text
from ckptstore.repository.resolve_ref import find_commit


def run(args: Namespace, screen: Screen) -> Exit:
    with opened(args, args.ref) as handle:
        from ckptstore.core.settings import Settings
        from ckptstore.interop.formats import export
        from ckptstore.store import Store

        found = find_commit(handle, args.ref, args.run)
        with Store(handle, Settings.of()) as store, screen.working(f"exporting {short(found.id)}"):
            snapshot = store.checkout(found.id)
            done = export(
                snapshot,
                args.path,
                format=args.format,
                select=args.select or "*",
                allow_pickle=args.allow_pickle,
            )
    if screen.json:
        screen.document(
            {
                "store": handle.url,
                "commit": found.id,
                "format": done.format,
                "files": [str(file) for file in done.files],
                "bytes": done.bytes,
                "left_out": done.left_out,
            }
        )
    else:
        screen.line(
            f"{short(found.id)} to {args.path} as {done.format}: "
            f"{count_text(len(done.files), 'file')}, {bytes_text(done.bytes)}"
        )
        if done.left_out:
            screen.line(f"{done.left_out} other leaves are not in it")
    return Exit.OK
