"""The cases of peak memory: one commit, one restore or one average in a process of its own, by the
kernel's high-water mark of resident memory.

What is restored or averaged was saved by another process. The mark is reset just before the call
(`/proc/self/clear_refs`), so that what the state itself takes does not count; pages that a call
maps from files do. That process is `python -m benchmarks.memory WHO OPERATION FOLDER SCALE`.
"""

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ckptstore
from benchmarks import questions, states
from benchmarks.context import Context, Slot
from benchmarks.measure import Result, Series
from benchmarks.peers import PEERS
from benchmarks.progress import note
from benchmarks.saves import OURS
from benchmarks.status import status_bytes

ROUNDS = 3


def peak_save(context: Context) -> Result:
    return _peak(context, "save", "peak memory of a commit above the memory before it")


def peak_restore(context: Context) -> Result:
    return _peak(context, "restore", "peak memory of a restore in place above the memory before it")


def peak_average(context: Context) -> Result:
    its, slot = Series(), Slot(context)
    slot.fresh()
    _probe(OURS, "commit ten", slot.path, context.scale)
    for number in range(min(context.rounds, ROUNDS)):
        note(f"peak-average: round {number + 1}")
        its.values.append(_probe(OURS, "average", slot.path, context.scale))
    slot.clear()
    title = "peak memory of an average of ten commits above the memory before it"
    return Result("peak-average", title, "B", 0, {OURS: its})


def _peak(context: Context, operation: str, title: str) -> Result:
    series: dict[str, Series] = {
        name: Series() for name in [OURS, *(peer.name for peer in context.peers)]
    }
    slot = Slot(context)
    for number in range(min(context.rounds, ROUNDS)):
        for name, its in series.items():
            note(f"peak-{operation}: round {number + 1}: {name}")
            slot.fresh()
            saved = _probe(name, "save", slot.path, context.scale)
            its.values.append(
                saved if operation == "save" else _probe(name, operation, slot.path, context.scale)
            )
            slot.clear()
    return Result(f"peak-{operation}", title, "B", 0, series)


def _probe(name: str, operation: str, folder: Path, scale: float) -> int:
    command = [sys.executable, "-m", "benchmarks.memory", name, operation, str(folder), str(scale)]
    extra_bytes: int = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return extra_bytes


def _extra_bytes(act: Callable[[], object]) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    act()
    return status_bytes("VmHWM") - before


def probe(name: str, operation: str, folder: Path, scale: float) -> int:
    state = states.gpt(scale)
    if name == OURS:
        with ckptstore.open(folder) as store:
            if operation == "save":
                return _extra_bytes(lambda: store.commit(state.app, step=0))
            if operation == "commit ten":
                return _extra_bytes(lambda: questions.commit_ten(store, state))
            if operation == "average":
                return _extra_bytes(lambda: questions.average_ten(store))
            return _extra_bytes(lambda: store.checkout(0).restore(state.app))
    peer = next(peer for peer in PEERS if peer.name == name)
    return _extra_bytes(
        partial(peer.write, state, folder)
        if operation == "save"
        else partial(peer.load, folder, state)
    )


if __name__ == "__main__":
    # The peers warn that they run in a single process: that is what is measured.
    warnings.simplefilter("ignore")
    who, what, where, scale_ = sys.argv[1:]
    print(json.dumps(probe(who, what, Path(where), float(scale_))))
