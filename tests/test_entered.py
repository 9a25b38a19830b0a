"""How much of the package a small operation enters; the ceilings may only be lowered."""

import subprocess
import sys

from tests.support.entered import Entered, operations, trace

CEILINGS = {
    "commit": (64, 470, 1_095),
    "restore": (55, 310, 825),
    "gc": (42, 530, 1_150),
}
"""Files, changes of room and calls, five in a hundred above what was measured."""


def test_operations_enter_no_more_of_the_package_than_before() -> None:
    found: dict[str, list[Entered]] = {name: [] for name in CEILINGS}
    for _ in range(3):  # a slow moment of the machine adds waits and reports; none takes any away
        with operations() as acts:
            assert acts.keys() == CEILINGS.keys()
            for name, act in acts.items():
                found[name].append(trace(act))
    for name, (files, changes, calls) in CEILINGS.items():
        least = min(found[name], key=lambda entered: len(entered.files))
        assert len(least.files) <= files, f"{name}: {sorted(least.files)}"
        assert not [file for file in least.files if file.startswith("distributed/")], name
        assert min(entered.changes for entered in found[name]) <= changes, found[name]
        assert min(entered.calls for entered in found[name]) <= calls, found[name]


def test_a_process_that_works_alone_imports_nothing_of_many_ranks() -> None:
    code = "import sys, torch, ckptstore.store; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ckptstore.snapshot" in done.stdout.split()
    assert "ckptstore.distributed" not in done.stdout
