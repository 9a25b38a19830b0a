"""`ckptstore tag`: list tags, set one, remove some."""

import time
from argparse import Namespace
from collections.abc import Sequence

from ckptstore.cli import timestamps
from ckptstore.cli.exits import Exit, UsageError
from ckptstore.cli.format import commit_text, first_line, short, step_text
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table
from ckptstore.cli.trees import reading
from ckptstore.core.ids import check_tag
from ckptstore.core.text import near
from ckptstore.errors import NotFound
from ckptstore.repository.resolve_ref import find_id
from ckptstore.repository.store_handle import StoreHandle


def run(args: Namespace, screen: Screen) -> Exit:
    if args.delete and args.name:
        raise UsageError("-d removes tags and takes no other arguments", "ckptstore tag")
    with opened(args, *filter(None, [args.ref])) as store:
        if args.delete:
            return _remove(store, screen, args.delete)
        if args.name:
            return _set(store, screen, check_tag(args.name), args.ref or "latest", args.run)
        return _list(store, screen, args)


def _list(store: StoreHandle, screen: Screen, args: Namespace) -> Exit:
    queries = store.queries()
    tags = queries.tags()
    if args.names and not screen.json:
        for tag in tags:
            screen.line(tag.name)
        return Exit.OK
    if screen.json:
        screen.document(
            {
                "store": store.url,
                "tags": [
                    {"name": tag.name, "commit": tag.commit, "run": tag.run, "step": tag.step}
                    for tag in tags
                ],
            }
        )
        return Exit.OK
    now_ns = time.time_ns()
    age = screen.terminal
    columns = (
        Column("tag", style="bold green"),
        Column("commit", style="yellow"),
        Column("step", right=True),
        Column("run"),
        Column("age" if age else "time", right=age),
        Column("message", fit="cut"),
    )
    infos = queries.commits([tag.commit for tag in tags])
    rows = tuple(
        (
            tag.name,
            tag.commit[: screen.id_digits],
            step_text(tag.step),
            tag.run,
            timestamps.age_text(info.time_ns, now_ns) if age else timestamps.utc_text(info.time_ns),
            first_line(info.message),
        )
        for tag, info in zip(tags, infos, strict=True)
    )
    if rows:
        screen.table(Table(columns, rows))
    else:
        screen.hint("no tags: `ckptstore tag NAME REF` sets one")
    return Exit.OK


def _set(store: StoreHandle, screen: Screen, name: str, ref: str, run: str | None) -> Exit:
    from ckptstore.maintenance.retention import set_tag

    queries = store.queries()
    info = queries.commit(find_id(queries, ref, run))
    before = next((tag.commit for tag in queries.tags() if tag.name == name), None)
    with reading(store) as reader:
        set_tag(store, reader, name, info)
    if screen.json:
        screen.document({"store": store.url, "tag": name, "commit": info.id, "previous": before})
    else:
        was = f", was {short(before)}" if before and before != info.id else ""
        screen.line(f"{name} is {commit_text(info)} of run {info.run}{was}")
    return Exit.OK


def _remove(store: StoreHandle, screen: Screen, names: Sequence[str]) -> Exit:
    from ckptstore.maintenance.retention import remove_tag

    store.check_writable()
    there = {tag.name: tag.commit for tag in store.queries().tags()}
    for name in names:
        if name not in there:
            raise NotFound(
                f"no tag {name!r}{near(name, there)}; nothing was removed, `ckptstore tag` lists "
                "them"
            )
    for name in dict.fromkeys(names):
        remove_tag(store, name)
    if screen.json:
        screen.document({"store": store.url, "removed": {name: there[name] for name in names}})
    else:
        for name in dict.fromkeys(names):
            screen.line(f"removed {name}, was {short(there[name])}")
    return Exit.OK
