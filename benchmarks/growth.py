"""`python -m benchmarks.growth` draws docs/growth.svg: bytes on disk over a run, as files of
`torch.save` and as commits, for a dense training and for a fine-tune of adapters.

Both are real trainings of the demo's model, a transformer of 0.8 million parameters, with AdamW,
its two moments and the random state. What is counted is what the file system has allocated.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ckptstore
from demo.model import CharacterModel, add_adapters, loss_of
from demo.text import batch, library
from demo.train import app_state, deterministic

COMMITS = 20
STEPS_PER_COMMIT = 2
TARGET = Path(__file__).parents[1] / "docs" / "growth.svg"
TITLES = {"dense": "all weights train", "adapters": "adapters train, the base is frozen"}


def states(kind: str) -> Iterator[dict[str, Any]]:
    """The application state at each checkpoint of a training."""
    deterministic()
    text = library()
    model = CharacterModel()
    trained = list(model.parameters()) if kind == "dense" else add_adapters(model)
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    state = app_state(model, optimizer)
    for count in range(1, COMMITS + 1):
        for _ in range(STEPS_PER_COMMIT):
            optimizer.zero_grad()
            loss_of(model, *batch(text, 8)).backward()
            optimizer.step()
        state["progress"]["step"] = count
        yield state


def allocated_bytes(folder: Path) -> int:
    return sum(
        os.lstat(Path(parent, name)).st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    )


def measure(kind: str, folder: Path) -> tuple[list[int], list[int]]:
    """Bytes on disk after each checkpoint: files of `torch.save`, and the store with all it has."""
    files, place = folder / "files", folder / "store"
    files.mkdir(parents=True)
    saved, committed = [], []
    with ckptstore.open(place) as store:
        empty = allocated_bytes(place)
        for state in states(kind):
            step = state["progress"]["step"]
            values = {
                key: value.state_dict() if hasattr(value, "state_dict") else value
                for key, value in state.items()
            }
            torch.save(values, files / f"{step}.pt")
            store.commit(state, step=step)
            saved.append(allocated_bytes(files))
            committed.append(allocated_bytes(place))
    print(
        f"{kind}: {COMMITS} checkpoints, torch.save {saved[-1] / 1e6:.1f} MB, ckptstore "
        f"{committed[-1] / 1e6:.1f} MB, {empty / 1e6:.1f} MB of it for the empty store"
    )
    return saved, committed


def draw(path: Path, measured: dict[str, tuple[list[int], list[int]]]) -> None:
    """One panel a training, one line a way to save."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ckptstore"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(measured), figsize=(9, 3.2), layout="constrained")
    for panel, (kind, (saved, committed)) in zip(panels, measured.items(), strict=True):
        for label, line, colour, above in (
            ("a file per checkpoint, torch.save", saved, "#d1a054", -6),
            ("commits, ckptstore", committed, "#0b6e4f", 6),
        ):
            megabytes = [nbytes / 1e6 for nbytes in line]
            panel.plot(range(1, COMMITS + 1), megabytes, label=label, color=colour, linewidth=2)
            panel.annotate(
                f"{megabytes[-1]:.0f} MB",
                (COMMITS, megabytes[-1]),
                xytext=(4, above),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=colour,
            )
        panel.set_title(TITLES[kind], fontsize=10)
        panel.set_xlabel("checkpoints")
        panel.set_ylabel("MB on disk")
        panel.set_xlim(1, COMMITS * 1.15)
        panel.set_xticks([1, 5, 10, 15, COMMITS])
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        draw(TARGET, {kind: measure(kind, Path(folder, kind)) for kind in TITLES})


if __name__ == "__main__":
    main()
