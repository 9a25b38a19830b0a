"""`ckptstore ls`: the leaves of a commit, folded on a terminal where there are too many to look
at."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ckptstore.cli.exits import Exit
from ckptstore.cli.format import FOLD_ABOVE, fold, short, step_text, value_text
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.cli.table import Column, Table
from ckptstore.cli.trees import leaves_of, pickles_of, reading, tensor_bytes, trees_of
from ckptstore.core.ids import CHUNK_ID_BYTES, CommitId
from ckptstore.core.model import CommitInfo, Shape
from ckptstore.core.text import bytes_text, count_text, near, selector
from ckptstore.errors import InvalidInput, NotFound
from ckptstore.index.queries import Queries
from ckptstore.repository.resolve_ref import find_id
from ckptstore.repository.store_handle import StoreHandle


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf. `nbytes`, of a leaf that is no tensor, `chunks` and `value` are known with `--long`
    only."""

    path: str
    kind: str
    dtype: str
    shape: Shape
    nbytes: int | None
    alias_of: str | None
    chunks: int | None = None
    value: str | None = None


def run(args: Namespace, screen: Screen) -> Exit:
    with opened(args, args.ref) as store:
        queries = store.queries()
        info = queries.commit(_resolve(queries, args))
        everything = _rows(store, queries, info, content=args.long)
        is_selected = selector(args.globs or "*")
        rows = [row for row in everything if is_selected(row.path)]
        if args.globs and not rows:
            keys = {*(row.path for row in everything), *info.schemas}
            raise NotFound(
                f"no leaf of {short(info.id)} matches "
                f"{' or '.join(map(repr, args.globs))}{near(args.globs[0], keys)}"
            )
        if screen.json:
            leaves = [
                {
                    name: value
                    for name, value in asdict(row).items()
                    if args.long or name not in ("chunks", "value")
                }
                for row in rows
            ]
            screen.document({"store": store.url, "commit": info.id, "leaves": leaves})
            return Exit.OK
    folded = (
        args.fold
        if args.fold is not None
        else screen.terminal and not args.long and len(rows) > FOLD_ABOVE
    )
    screen.table(_folded(rows) if folded else _listed(rows, long=args.long))
    step = f", step {step_text(info.step)}" if info.step is not None else ""
    total = bytes_text(sum(row.nbytes or 0 for row in rows))
    screen.hint(
        f"{len(rows):,} {'leaf' if len(rows) == 1 else 'leaves'}, {total} of tensors, commit "
        f"{short(info.id)}{step}"
    )
    if folded:
        screen.hint(
            "* stands for numbers; `ckptstore ls REF 'PATTERN'` lists those leaves, --all lists "
            "every one"
        )
    return Exit.OK


def _resolve(queries: Queries, args: Namespace) -> CommitId:
    try:
        return find_id(queries, args.ref, args.run)
    except (NotFound, InvalidInput) as error:
        if not args.globs:
            error.add_note(
                f"to list leaves of the newest commit, say `ckptstore ls latest '{args.ref}'`"
            )
        raise


def _rows(store: StoreHandle, queries: Queries, info: CommitInfo, *, content: bool) -> list[Row]:
    rows = []
    leaves = leaves_of(store, queries, info)
    pickles = pickles_of(store, info, leaves)
    for key, tree in leaves.items():
        pickled = set(pickles[key])
        rows += [
            Row(
                leaf.path,
                "pickle" if leaf.path in pickled else leaf.kind,
                leaf.dtype,
                leaf.shape,
                tensor_bytes(leaf),
                tree[leaf.alias].path if leaf.alias >= 0 else None,
            )
            for leaf in tree
        ]
    return _with_content(store, info, rows) if content else rows


def _with_content(store: StoreHandle, info: CommitInfo, rows: Sequence[Row]) -> list[Row]:
    """The rows with what only the pages say."""
    with reading(store) as reader:
        trees = trees_of(reader, info)
    where = {path: (tree, i) for tree in trees.values() for path, i in tree.numbers.items()}
    found = []
    for row in rows:
        tree, i = where[row.path]
        content = tree.content(i)
        nbytes = row.nbytes if row.kind == "tensor" else tree.raw_bytes(i)
        value = (
            value_text(content.inline)
            if row.kind == "value" and content.inline is not None
            else None
        )
        found.append(
            replace(
                row,
                nbytes=nbytes,
                chunks=0 if row.alias_of else len(content.ids) // CHUNK_ID_BYTES,
                value=value,
            )
        )
    return found


def _listed(rows: Sequence[Row], *, long: bool) -> Table:
    columns = (
        Column("path", fit="wrap"),
        Column("dtype", style="cyan"),
        Column("shape"),
        Column("bytes", right=True),
        Column("chunks", right=True),
        Column("value", fit="cut"),
        Column("same memory as", fit="wrap"),
    )
    cells = tuple(
        (
            row.path,
            row.dtype or row.kind,
            _shape_text(row.shape) if row.kind == "tensor" else "",
            "" if row.nbytes is None else bytes_text(row.nbytes),
            str(row.chunks or ""),
            row.value or "",
            row.alias_of or "",
        )
        for row in rows
    )
    table = Table(columns, cells)
    return _without_alias(table if long else table.without("chunks").without("value"), rows)


def _folded(rows: Sequence[Row]) -> Table:
    columns = (
        Column("leaves", right=True),
        Column("path", fit="wrap"),
        Column("dtype", style="cyan"),
        Column("shape"),
        Column("bytes", right=True),
        Column("same memory as", fit="wrap"),
    )
    groups = fold(rows, lambda row: (row.path, (row.kind, row.dtype, row.alias_of is None)))
    return _without_alias(
        Table(columns, tuple(_group(pattern, group) for pattern, group in groups)), rows
    )


def _group(pattern: str, rows: Sequence[Row]) -> tuple[str, ...]:
    shapes = dict.fromkeys(row.shape for row in rows)
    shape = (
        _shape_text(next(iter(shapes))) if len(shapes) == 1 else count_text(len(shapes), "shape")
    )
    sizes = [row.nbytes for row in rows if row.nbytes is not None]
    return (
        f"{len(rows):,}",
        pattern,
        rows[0].dtype or rows[0].kind,
        shape if rows[0].kind == "tensor" else "",
        bytes_text(sum(sizes)) if sizes else "",
        (f"{rows[0].alias_of}{' …' if len(rows) > 1 else ''}") if rows[0].alias_of else "",
    )


def _without_alias(table: Table, rows: Sequence[Row]) -> Table:
    return table if any(row.alias_of for row in rows) else table.without("same memory as")


def _shape_text(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"
