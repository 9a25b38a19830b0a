"""The plot of docs/benchmarks.md: speed by case and contestant, as SVG."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import PLOTTED
from benchmarks.results import Record

COLOURS = {
    "ckptstore": "#0b6e4f",
    "torch.save": "#d1a054",
    "safetensors": "#c8743c",
    "DCP": "#8c6bb1",
    "TorchSnapshot": "#b5517a",
    "torch_checkpointing": "#5b8fb9",
}
LIMIT_COLOUR = "#c9c9c9"


def draw(path: Path, records: Sequence[Record]) -> None:
    """One panel per case, one bar per contestant, limits in grey."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ckptstore"
    from matplotlib import pyplot

    results = [record.result for record in records if record.result.case in PLOTTED]
    if not results:
        return
    figure, panels = pyplot.subplots(
        1, len(results), figsize=(3.4 * len(results), 3.6), squeeze=False, layout="constrained"
    )
    for panel, result in zip(panels[0], results, strict=True):
        names = list(reversed(result.series))
        speeds = [result.nbytes / result.series[name].median / 1e9 for name in names]
        bars = panel.barh(names, speeds, color=[COLOURS.get(name, LIMIT_COLOUR) for name in names])
        panel.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
        panel.set_title(result.case)
        panel.set_xlabel("GB/s")
        panel.margins(x=0.18)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
