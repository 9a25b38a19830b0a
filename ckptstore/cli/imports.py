"""`ckptstore import`: a file or a directory of another format becomes a commit."""

from argparse import Namespace
from collections.abc import Sequence

from ckptstore.cli.exits import Exit, UsageError
from ckptstore.cli.format import short
from ckptstore.cli.screen import Screen
from ckptstore.cli.stores import opened
from ckptstore.core.text import bytes_text, count_text


def run(args: Namespace, screen: Screen) -> Exit:
    metrics = _metrics(args.metric)
    with opened(args) as handle:
        from ckptstore.core.settings import Settings
        from ckptstore.interop.formats import Labels, import_path
        from ckptstore.store import Store

        with (
            Store(handle, Settings.of(run=args.run)) as store,
            screen.working(f"importing {args.path}"),
        ):
            labels = Labels(args.step, tuple(args.tag), args.message, metrics)
            made = import_path(store, args.path, labels, allow_pickle=args.allow_pickle)
    leaves = made.leaves()
    if screen.json:
        screen.document(
            {
                "store": handle.url,
                "commit": made.id,
                "run": made.run,
                "step": made.step,
                "tags": list(made.tags),
                "logical_bytes": made.logical_bytes,
                "new_bytes": made.new_bytes,
                "leaves": len(leaves),
            }
        )
    else:
        size = f"{bytes_text(made.logical_bytes)}, of which {bytes_text(made.new_bytes)} are new"
        screen.line(
            f"{short(made.id)} of run {made.run}: "
            f"{count_text(len(leaves), 'leaf').replace('leafs', 'leaves')}, {size}"
        )
    return Exit.OK


def _metrics(texts: Sequence[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, value in map(_metric, texts):
        if metrics.setdefault(name, value) != value:
            raise UsageError(
                f"two values for the metric {name!r}, {metrics[name]} and {value}; it takes one",
                "ckptstore import",
            )
    return metrics


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is no metric: wanted one such as loss=2.31", "ckptstore import"
        ) from error
