"""The page as static files: its own, and the views that it would ask for, beside them."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ckptstore.errors import CkptStoreError, InvalidInput
from ckptstore.plugin.files import check_path
from ckptstore.plugin.progress import Progress, silent
from ckptstore.plugins.ui.commit_views import PART
from ckptstore.plugins.ui.history_views import TAGS_SHOWN
from ckptstore.plugins.ui.jobs import WAIT_S
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.server import STATIC, Page
from ckptstore.plugins.ui.values import Json, clip, encode, run_key
from ckptstore.plugins.ui.views import view

COMMITS = 200


def export(
    page: Page,
    directory: str | os.PathLike[str],
    *,
    commits: int = COMMITS,
    progress: Progress = silent,
) -> int:
    """Write the page into `directory`, which is new or empty, and return the number of files.

    The newest `commits` of each store, and tagged ones, have pages, and are compared with their
    first parents. Tensors are not read, so theirs have no statistics. Raises `InvalidInput` if
    `directory` has other content.
    """
    check_path(directory)
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInput(f"{target} is not empty; name a new directory")
    shutil.copytree(STATIC, target / "static")
    shutil.move(target / "static" / "index.html", target / "index.html")
    _write(target, "data/site.json", page.site(static=True))
    for store in page.stores:
        addresses = list(_addresses(store, commits))
        for done, address in enumerate(addresses):
            progress(f"writing {store.name}", done, len(addresses))
            _write(target, f"data/{store.number}/{address}.json", _value(page, store, address))
    return sum(path.is_file() for path in target.rglob("*"))


def _addresses(store: OpenStore, commits: int) -> Iterator[str]:
    yield from ("position", "store", "lineage", "forgotten", "health", "space")
    history = store.history()
    yield from (f"run/{run_key(run)}" for run in history.runs)
    newest = history.commits[:commits]
    tagged = (history.by_id.get(tag.commit) for tag in history.tags[:TAGS_SHOWN])
    for info in {info.id: info for info in (*newest, *filter(None, tagged))}.values():
        yield f"commit/{info.id}"
        yield f"sharing/{info.id}"
        yield from (f"leaves/{info.id}/{part}" for part in range(-(-info.leaves // PART) or 1))
        yield from (f"diff/{parent}/{info.id}" for parent in info.parents[:1])


def _value(page: Page, store: OpenStore, address: str) -> Json:
    """The view, waited for. What is damaged is said in its place."""
    try:
        found = view(store, page.jobs, address, {})
        while "progress" in found:
            time.sleep(WAIT_S / 10)
            found = view(store, page.jobs, address, {})
    except CkptStoreError as error:
        return {"error": clip(str(error)), "kind": type(error).__name__}
    return found


def _write(target: Path, name: str, value: Json) -> None:
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(value))
