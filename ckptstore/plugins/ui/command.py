"""`ckptstore ui`: serve a web page of stores, or write it as static files."""

from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

from ckptstore.cli.call import Answer, Call
from ckptstore.cli.screen import Hint, Part
from ckptstore.errors import InvalidInput
from ckptstore.plugin.text import count_text

if TYPE_CHECKING:
    from ckptstore.plugins.ui.server import Listening

LOOPBACK = "127.0.0.1"
EXPOSED = (
    "the page is served at {}, so other machines reach it, unencrypted: whoever has the address "
    "reads the store; an SSH tunnel to the default host is safer"
)


def ui(call: Call) -> Answer:
    args = call.args
    try:
        from ckptstore.plugins.ui.server import Page, listen
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"the page needs {error.name}, which is not installed: pip install 'ckptstore[ui]'"
        ) from error
    from ckptstore.plugins.ui.guard import is_loopback
    from ckptstore.plugins.ui.jobs import Jobs
    from ckptstore.plugins.ui.opened import OpenStore

    stores = [
        call.stack.enter_context(closing(OpenStore(number, handle)))
        for number, handle in enumerate(call.open_all())
    ]
    places = {"stores": [store.name for store in stores]}
    if args.export is not None:
        from ckptstore.plugins.ui.export import export

        jobs = call.stack.enter_context(closing(Jobs()))
        with call.screen.progress() as shown:
            files = export(
                Page(stores, jobs, ""), args.export, commits=args.commits, progress=shown
            )
        written = f"{args.export}: {count_text(files, 'file')}; any static host serves them"
        return Answer({**places, "directory": args.export, "files": files}, [written])
    for store in stores:
        store.position()  # so that the first page does not wait for the catalog
    host = args.host or LOOPBACK
    listening = listen(stores, host=host, port=args.port, allow_changes=args.allow_changes)
    call.stack.callback(listening.close)
    problems = [] if is_loopback(host) else [EXPOSED.format(host)]
    page: list[Part] = [listening.url, Hint("Ctrl-C ends it; the address is a secret")]
    document = {**places, "url": listening.url, "port": listening.port}
    return Answer(document, page, problems, then=partial(_serve, call, listening))


def _serve(call: Call, listening: "Listening") -> None:
    if call.args.open:
        import webbrowser

        webbrowser.open(listening.url)
    with suppress(KeyboardInterrupt):
        listening.serve()
