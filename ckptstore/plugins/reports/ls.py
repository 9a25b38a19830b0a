"""`ckptstore ls`: the leaves of a commit, folded on a terminal if there are many."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from ckptstore.cli.call import Answer, Call
from ckptstore.cli.commits import reader_of, schemas_of, short
from ckptstore.cli.screen import Hint, Part, columns, fields_of
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.leaves import pickled_paths
from ckptstore.plugin.model import CHUNK_ID_BYTES, CommitInfo, Schema, Shape
from ckptstore.plugin.text import Table, bytes_text, count_text, near, selector
from ckptstore.plugins.reports.listing import find_info, fold, is_folded, tensor_bytes

if TYPE_CHECKING:
    from ckptstore.plugin.reading import Tree

_LONG = ("chunks", "value")


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf. `chunks`, `value` and `nbytes` of a leaf that is no tensor are known only with
    `--long`."""

    path: str
    kind: str
    dtype: str
    shape: Shape
    nbytes: int | None
    alias_of: str | None
    chunks: int | None = None
    value: str | None = None
    gone: bool = False


def ls(call: Call) -> Answer:
    args = call.args
    store = call.open(args.ref)
    info, queries = _find(call, store), store.queries()
    is_selected = selector(args.globs or "*")
    schemas = schemas_of(store, queries, info)
    everything = _rows(schemas.values())
    rows = [row for row in everything if is_selected(row.path)]
    below = not rows and any("plain" in schema.kinds for schema in schemas.values())
    if below or args.long or info.thinned:
        from ckptstore.plugin.reading import contents_at

        contents = contents_at(store, reader_of(call, store), info)
        trees = contents.trees if below else contents.stored_trees
    if below:
        everything = _rows(tree.schema for tree in trees.values())
        rows = [row for row in everything if is_selected(row.path)]
    if args.globs and not rows:
        keys = {*(row.path for row in everything), *info.schemas}
        wanted = " or ".join(map(repr, args.globs))
        raise NotFound(f"no leaf of {short(info.id)} matches {wanted}{near(args.globs[0], keys)}")
    if args.long or info.thinned:
        rows = _with_content(trees.values(), rows)
    step = "" if info.step is None else f", step {info.step}"
    total = bytes_text(sum(row.nbytes or 0 for row in rows))
    counted = count_text(len(rows), "leaf", "leaves")
    folded = is_folded(call, len(rows), unless=args.long)
    page: list[Part] = [
        _table(rows, folded=folded, long=args.long),
        Hint(f"{counted}, {total} of tensors, commit {short(info.id)}{step}"),
    ]
    if folded:
        advice = "`ckptstore ls REF 'PATTERN'` lists those leaves, --all lists every one"
        page.append(Hint(f"* stands for numbers; {advice}"))
    names = [each.name for each in fields(Row) if args.long or each.name not in _LONG]
    return Answer({"commit": info.id, "leaves": [fields_of(row, *names) for row in rows]}, page)


def _find(call: Call, store: StoreHandle) -> CommitInfo:
    try:
        return find_info(call, store, call.args.ref)
    except (NotFound, InvalidInput) as error:
        if not call.args.globs:
            error.add_note(
                f"to list leaves of the newest commit, say `ckptstore ls latest '{call.args.ref}'`"
            )
        raise


def _rows(schemas: Iterable[Schema]) -> list[Row]:
    """The leaves of all trees, those of each key together."""
    rows = []
    for schema in schemas:
        pickles, paths = set(pickled_paths(schema)), schema.paths
        rows += [
            Row(
                path,
                "pickle" if path in pickles else schema.kinds[i],
                schema.dtypes[i],
                schema.shapes[i],
                tensor_bytes(schema, i),
                paths[schema.aliases[i]] if schema.aliases[i] >= 0 else None,
            )
            for i, path in enumerate(paths)
        ]
    return sorted(rows, key=lambda row: row.path.partition("/")[0])


def _with_content(trees: Iterable["Tree"], rows: Sequence[Row]) -> list[Row]:
    """The rows with what only the pages of the commit have."""
    from ckptstore.plugins.reports.difference import LeafAt

    where = {path: (tree, i) for tree in trees for path, i in tree.numbers.items()}
    found = []
    for row in rows:
        tree, i = where[row.path]
        nbytes = row.nbytes if row.kind == "tensor" else tree.raw_bytes(i)
        if tree.is_gone(i):
            found.append(replace(row, nbytes=0, chunks=0, gone=True))
            continue
        chunks = 0 if row.alias_of else len(tree.content(i).ids) // CHUNK_ID_BYTES
        found.append(replace(row, nbytes=nbytes, chunks=chunks, value=LeafAt(tree, i).text.value))
    return found


def _table(rows: Sequence[Row], *, folded: bool, long: bool) -> Table:
    """One line per leaf, or per group of leaves that differ only in the numbers of their paths."""
    names = ("leaves", "path", "dtype", "shape", "bytes", "chunks", "value", "same memory as")
    groups = [(row.path, [row]) for row in rows]
    if folded:
        groups = fold(rows, lambda r: (r.path, (r.kind, r.dtype, r.alias_of is None, r.gone)))
    cells = [(len(group), path, *_cells(group)) for path, group in groups]
    hidden = [*([] if folded else ["leaves"]), *([] if long and not folded else _LONG)]
    return Table(columns(*names), cells).without(*hidden).without_empty("same memory as")


def _cells(rows: Sequence[Row]) -> tuple[object, ...]:
    first, shapes = rows[0], {row.shape for row in rows}
    shape = f"[{', '.join(map(str, first.shape))}]" if first.kind == "tensor" else None
    sizes = [row.nbytes for row in rows if row.nbytes is not None]
    return (
        f"{first.dtype or first.kind}{' (gone)' if first.gone else ''}",
        shape if len(shapes) == 1 else count_text(len(shapes), "shape"),
        sum(sizes) if sizes else None,
        first.chunks or None,
        first.value,
        f"{first.alias_of} …" if first.alias_of and len(rows) > 1 else first.alias_of,
    )
