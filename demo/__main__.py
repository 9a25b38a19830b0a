"""The story of the demo: train, be killed, resume, compare; fine-tune; look at the log and at what
it all takes on disk."""

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch

import ckptstore
from demo.finetune import finetune
from demo.train import COMMIT_EVERY, STEPS

KILLED_AT = STEPS * 2 // 3


def say(line: str) -> None:
    print(line, flush=True)


def chapter(title: str) -> None:
    say(f"\n== {title}")


def train(store: Path, run: str, kill_at: int | None = None) -> int:
    """The job in a process of its own, its lines indented; SIGKILL hits it while it commits step
    `kill_at`. Returns its exit status."""
    command = [sys.executable, "-m", "demo.train", str(store), run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            say(f"   {line.rstrip()}")
            if (
                kill_at is not None
                and line.startswith(f"step {kill_at}/")
                and line.endswith("committing\n")
            ):
                job.send_signal(signal.SIGKILL)
    return job.returncode


def expect(fact: bool, text: str) -> None:
    """The demo proves what it says."""
    if not fact:
        raise SystemExit(f"FAILED: {text}")
    say(f"   yes: {text}")


def compare(place: Path) -> None:
    """Bit for bit, and by content id."""
    with ckptstore.open(place) as store:
        whole, resumed = store.checkout("uninterrupted-done"), store.checkout("resumed-done")
        a, b = (snapshot.state_dict("model") for snapshot in (whole, resumed))
        same = a.keys() == b.keys() and all(
            torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a
        )
        expect(same, f"all {len(a)} tensors of the model are bit-identical")
        expect(
            whole.content_id == resumed.content_id,
            f"optimizer, random state and all: content id {whole.content_id[:16]}…",
        )


def torch_save_bytes(snapshot: ckptstore.Snapshot) -> int:
    """What `torch.save` of the same state takes."""
    file = io.BytesIO()
    torch.save(snapshot.state_dict(), file)
    return file.getbuffer().nbytes


def bill(place: Path) -> None:
    """Bytes on disk beside what a file per checkpoint would take."""
    say(f"   {'run':14} {'commits':>7} {'torch.save':>12} {'ckptstore':>12}")
    saved = 0
    with ckptstore.open(place) as store:
        for run in store.runs():
            snapshots = [store.checkout(info.id) for info in store.log(run=run)]
            as_files, new = (
                sum(map(torch_save_bytes, snapshots)),
                sum(snapshot.new_bytes for snapshot in snapshots),
            )
            saved += as_files
            say(f"   {run:14} {len(snapshots):7} {as_files / 1e6:9.1f} MB {new / 1e6:9.1f} MB")
    used = sum(
        os.lstat(Path(parent, name)).st_blocks * 512
        for parent, _, names in os.walk(place)
        for name in names
    )
    say(
        f"   on disk, everything counted: {used / 1e6:.1f} MB instead of {saved / 1e6:.1f} MB: "
        f"{saved / used:.1f} times less"
    )


def main() -> int:
    parser = argparse.ArgumentParser("python -m demo", description=__doc__)
    parser.add_argument(
        "--store",
        type=Path,
        default=Path(".demo"),
        help="where the store goes; what is there is replaced (default .demo)",
    )
    place: Path = parser.parse_args().store
    start = perf_counter()
    shutil.rmtree(place, ignore_errors=True)

    chapter(
        f"1. train, a commit every {COMMIT_EVERY} steps; SIGKILL while it commits step {KILLED_AT}"
    )
    expect(train(place, "resumed", kill_at=KILLED_AT) == -signal.SIGKILL, "killed")
    chapter(
        "2. start it again: store.resume() finds the newest commit that verifies; on to step "
        f"{STEPS}"
    )
    expect(train(place, "resumed") == 0, "finished")
    chapter("3. the same from the beginning, without interruption")
    expect(train(place, "uninterrupted") == 0, "finished")
    chapter("4. do both end at the same state?")
    compare(place)
    chapter("5. fine-tune: low-rank adapters on the frozen base, ten commits")
    finetune(str(place), "resumed-done", lambda line: say(f"   {line}"))
    chapter("6. ckptstore log")
    subprocess.run([sys.executable, "-m", "ckptstore", "--store", str(place), "log"], check=True)
    chapter("7. the bill")
    bill(place)
    say(
        f"\nDone in {perf_counter() - start:.0f} s. The store is in {place}: try `ckptstore -s "
        f"{place} show resumed-done`."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
