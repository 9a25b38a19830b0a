"""`ckptstore init`: make an empty store."""

import os
from argparse import Namespace

from ckptstore.cli.exits import Exit
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import VARIABLE
from ckptstore.core.text import bytes_text
from ckptstore.repository.init_store import init_store


def run(args: Namespace, screen: Screen) -> Exit:
    place = args.path or args.store or os.environ.get(VARIABLE) or "."
    if "://" not in place:
        place = os.path.abspath(place)
    config = init_store(
        place, chunk_bytes=args.chunk_size, codec=args.codec, private=args.private, index=args.index
    )
    if screen.json:
        screen.document(
            {
                "store": place,
                "store_id": config.store,
                "chunk_bytes": config.chunk_bytes,
                "codec": config.codec,
            }
        )
    else:
        screen.line(
            f"made an empty store at {place} (chunks of {bytes_text(config.chunk_bytes)}, codec "
            f"{config.codec})"
        )
    return Exit.OK
