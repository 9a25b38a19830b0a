"""`ckptstore tag`: list, set or remove tags."""

from ckptstore.cli.call import Answer, Call
from ckptstore.cli.commits import commit_text, first_line, reader_of, short
from ckptstore.cli.exits import UsageError
from ckptstore.cli.screen import Hint
from ckptstore.core.ids import check_tag
from ckptstore.core.tables import TAG, Column, Table
from ckptstore.core.text import near
from ckptstore.errors import NotFound
from ckptstore.repository.resolve_ref import find_id
from ckptstore.repository.store_handle import StoreHandle


def tag(call: Call) -> Answer:
    args = call.args
    if args.delete and args.name:
        raise UsageError("-d removes tags and takes no other arguments", "ckptstore tag")
    store = call.open(*filter(None, [args.ref]))
    if args.delete:
        return _remove(store, dict.fromkeys(args.delete))
    if args.name:
        return _set(call, store, check_tag(args.name))
    queries = store.queries()
    tags = queries.tags()
    document = {"tags": [found._asdict() for found in tags]}
    if args.names or not tags:
        hint = Hint("no tags: `ckptstore tag NAME REF` sets one")
        return Answer(document, [found.name for found in tags] or [hint])
    columns = (
        Column("tag", style=TAG),
        Column("commit", "id"),
        Column("step", "step"),
        Column("run"),
        Column("time", "time"),
        Column("message", fit="cut"),
    )
    infos = queries.commits([found.commit for found in tags])
    rows = [
        (found.name, info.id, info.step, info.run, info.time_ns, first_line(info.message))
        for found, info in zip(tags, infos, strict=True)
    ]
    return Answer(document, [Table(columns, rows)])


def _set(call: Call, store: StoreHandle, name: str) -> Answer:
    from ckptstore.maintenance.retention import set_tag

    queries = store.queries()
    info = queries.commit(find_id(queries, call.args.ref or "latest", call.args.run))
    before = next((found.commit for found in queries.tags() if found.name == name), None)
    set_tag(store, reader_of(call, store), name, info)
    was = f", was {short(before)}" if before and before != info.id else ""
    line = f"{name} is {commit_text(info)} of run {info.run}{was}"
    return Answer({"tag": name, "commit": info.id, "previous": before}, [line])


def _remove(store: StoreHandle, names: dict[str, None]) -> Answer:
    from ckptstore.maintenance.retention import remove_tag

    store.check_writable()
    there = {tag.name: tag.commit for tag in store.queries().tags()}
    for name in names:
        if name not in there:
            raise NotFound(
                f"no tag {name!r}{near(name, there)}; nothing was removed, `ckptstore tag` lists "
                "the tags"
            )
    for name in names:
        remove_tag(store, name)
    removed = {name: there[name] for name in names}
    lines = [f"removed {name}, was {short(commit)}" for name, commit in removed.items()]
    return Answer({"removed": removed}, lines)
