"""`ckptstore tag`: list, set, rename and remove tags."""

from collections.abc import Sequence

from ckptstore.cli.call import Answer, Call, UsageError
from ckptstore.cli.commits import commit_text, find_proven, first_line, reader_of, short
from ckptstore.cli.screen import Hint, columns
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.model import check_tag
from ckptstore.plugin.text import Table


def tag(call: Call) -> Answer:
    args = call.args
    if args.delete and (args.name or args.rename):
        raise UsageError("-d removes tags and takes no other arguments")
    if args.rename and not args.ref:
        raise UsageError("--rename takes the name of a tag and its new name")
    if args.rename:
        return _rename(call, args.name, check_tag(args.ref))
    store = call.open(*filter(None, [args.ref]))
    if args.delete:
        return _remove(store, args.delete)
    if args.name:
        return _set(call, store, check_tag(args.name))
    queries = store.queries()
    tags = queries.tags()
    document = {"tags": tags}
    if args.names or not tags:
        hint = Hint("no tags: `ckptstore tag NAME REF` sets one")
        return Answer(document, [found.name for found in tags] or [hint])
    infos = queries.commits([found.commit for found in tags])
    rows = [
        (found.name, info.id, info.step, info.run, info.time_ns, first_line(info.message))
        for found, info in zip(tags, infos, strict=True)
    ]
    table = Table(columns("tag", "commit", "step", "run", "time", "message"), rows)
    return Answer(document, [table])


def _set(call: Call, store: StoreHandle, name: str) -> Answer:
    from ckptstore.plugin.upkeep import set_tag

    info = find_proven(call, store, call.args.ref or "latest")
    before = store.log.state.tags.get(name)
    set_tag(store, reader_of(call, store), name, info)
    was = f", was {short(before)}" if before and before != info.id else ""
    line = f"{name} is {commit_text(info)}{was}"
    return Answer({"tag": name, "commit": info.id, "previous": before}, [line])


def _rename(call: Call, old: str, new: str) -> Answer:
    from ckptstore.plugin.upkeep import rename_tag

    store = call.open()
    commit = rename_tag(store, reader_of(call, store), old, new)
    return Answer(
        {"tag": new, "commit": commit, "renamed": old}, [f"{new} is {short(commit)}, was {old}"]
    )


def _remove(store: StoreHandle, names: Sequence[str]) -> Answer:
    from ckptstore.plugin.upkeep import remove_tags

    removed = remove_tags(store, *names)
    lines = [f"removed {name}, was {short(commit)}" for name, commit in removed.items()]
    return Answer({"removed": removed}, lines)
