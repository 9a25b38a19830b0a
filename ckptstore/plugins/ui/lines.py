"""Which lines load this commit? They are offered to be copied, so each of them must run: a commit
that is forgotten, thinned or damaged has other lines than a whole one."""

import glob
import shlex
from collections.abc import Iterator, Mapping
from keyword import iskeyword

from ckptstore.plugin.leaves import pickled_paths
from ckptstore.plugin.model import CommitInfo
from ckptstore.plugin.reading import CommitContents, Tree
from ckptstore.plugins.adopt.manifest import FILES
from ckptstore.plugins.adopt.materializing import is_adopted
from ckptstore.plugins.ui.opened import OpenStore
from ckptstore.plugins.ui.values import TEXT_CHARACTERS, Json, clip


def lines_for(store: OpenStore, info: CommitInfo, contents: CommitContents | None) -> list[Json]:
    """How to load the commit. None for `contents` that cannot be read: no line loads those."""
    if info.forgotten:
        found = [("Bring it back", _command("undelete", store, info))]
    elif contents is None:
        found = []
    else:
        found = [*_restore(store, info, contents), *_export(store, info, contents)]
    return [{"what": what, "text": clip(text, TEXT_CHARACTERS)} for what, text in found]


def left_out(info: CommitInfo, contents: CommitContents | None) -> list[str]:
    """The keys that no line loads, because leaves of them were thinned away."""
    if info.forgotten or contents is None:
        return []
    whole = _whole(contents)
    return [key for key in contents.trees if key not in whole]


def _whole(contents: CommitContents) -> Mapping[str, Tree]:
    """The trees without a leaf that is gone."""
    trees = contents.trees.items()
    return {key: tree for key, tree in trees if not any(map(tree.is_gone, range(len(tree.schema))))}


def _restore(
    store: OpenStore, info: CommitInfo, contents: CommitContents
) -> Iterator[tuple[str, str]]:
    whole = _whole(contents)
    if not whole:
        return
    index = "" if store.index is None else f", storage=ckptstore.Storage(index={store.index!r})"
    opened = f"import ckptstore\n\nwith ckptstore.open({store.name!r}{index}) as store:\n"
    opened += f"    snapshot = store.checkout({info.id[:12]!r})\n"
    if not is_adopted(contents):
        items = ", ".join(f"{key!r}: {_variable(key)}" for key in whole)
        trust = _trust(*whole.values())
        yield "Restore in place", f"{opened}    snapshot.restore({{{items}}}{trust})"
    key = next((key for key in ("model", FILES) if key in whole), next(iter(whole)))
    trust = _trust(whole[key])
    yield "Load the weights", f"{opened}    weights = snapshot.state_dict({key!r}{trust})"


def _variable(key: str) -> str:
    """The variable that has the object of a key, where the key can be the name of one."""
    return key if key.isidentifier() and not iskeyword(key) else "…"


def _trust(*trees: Tree) -> str:
    """The consent that reading these trees takes."""
    return ", allow_pickle=True" if any(pickled_paths(tree.schema) for tree in trees) else ""


def _export(
    store: OpenStore, info: CommitInfo, contents: CommitContents
) -> Iterator[tuple[str, str]]:
    whole = _whole(contents)
    is_whole = len(whole) == len(contents.trees)
    if is_adopted(contents) and is_whole:
        yield "Write its files", f"{_command('materialize', store, info)} directory"
        return
    trees = [tree for tree in whole.values() if "tensor" in tree.schema.kinds]
    if trees:
        some = "".join(f" --select {shlex.quote(_selection(tree))}" for tree in trees)
        file = "weights.safetensors --format safetensors"
        yield "Export", f"{_command('export', store, info)} {file}{'' if is_whole else some}"


def _selection(tree: Tree) -> str:
    """What selects the leaves of a key alone, also if its name looks like a glob."""
    first = tree.schema.paths[0]
    top, below, _ = first.partition("/")
    return tree.key if top == glob.escape(top) else f"{glob.escape(top)}{below and '/*'}"


def _command(name: str, store: OpenStore, info: CommitInfo) -> str:
    index = "" if store.index is None else f" --index {shlex.quote(store.index)}"
    return f"ckptstore {name} -s {shlex.quote(store.name)}{index} {info.id[:12]}"
