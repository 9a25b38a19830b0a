"""`ckptstore undelete`: bring forgotten commits back."""

from argparse import Namespace

from ckptstore.cli.exits import Exit
from ckptstore.cli.format import commit_text
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.maintenance.retention import undelete
from ckptstore.repository.resolve_ref import find_id


def run(args: Namespace, screen: Screen) -> Exit:
    with opened(args, *args.refs) as store:
        store.check_writable()
        queries = store.queries()
        infos = [queries.commit(find_id(queries, ref, None)) for ref in args.refs]
        undelete(store, [info.id for info in infos])
        store.follow()
        if screen.json:
            screen.document({"store": store.url, "undeleted": [info.id for info in infos]})
            return Exit.OK
    for info in infos:
        screen.line(f"{commit_text(info)} of run {info.run} is back")
    return Exit.OK
