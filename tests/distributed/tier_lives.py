"""A training of several ranks on one host, with a mirror, that is killed, loses its disk or the
mirror, and starts again: what each life resumed, and whether that is right.

`play` runs one scenario by its seed. Ranks are real processes, ended by SIGKILL. What a life has
achieved it writes line by line to a file.
"""

import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import ckptstore
from ckptstore.errors import CkptStoreError, Unavailable
from tests.distributed.pool import IMPORTED

N = 2
RUN_S = 120.0


@dataclass(frozen=True)
class Life:
    """What the ranks of one life are told."""

    number: int
    folder: Path
    steps: int
    every: int
    keep: int


def state(salt: float, step: int) -> dict[str, Any]:
    """Rows that several ranks hold, a leaf of each rank, and what they must agree with."""
    from tests.distributed.layouts import full, layout

    rows = layout("rows", full() + salt + step, N)
    return {"model": {"rows": rows}, "said": {"salt": salt, "step": step}}


def live(rank: int, life: Life) -> None:
    """Resume, check, commit; the first rank tells."""
    import torch
    import torch.distributed as dist

    from ckptstore.plugins.tiers import tiers
    from tests.distributed.layouts import full, layout, local, meet

    os.environ["CKPTSTORE_THREADS"], random = "2", Random(life.number)
    torch.set_num_threads(1)
    at, opened = life.folder, tiers.Tier._opened

    def unless_away(tier: Any) -> Any:
        if (at / "away").exists():
            raise Unavailable("the network is down")
        return opened(tier)

    tiers.Tier._opened = unless_away  # type: ignore[method-assign]
    tiers.FIRST_PAUSE_S = 0.05
    meeting = f"file://{at / f'meeting-{life.number}'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=N)
    meet(N)
    keep = ckptstore.KeepLast(life.keep)
    mirror = ckptstore.Mirror(at / "mirror", keep_local=keep, every_steps=life.every)
    storage = ckptstore.Storage(chunk_bytes=64 << 10)
    with ckptstore.open(at / "local", mirror=mirror, storage=storage) as store:
        target = state(0.0, 0)
        found = store.resume(target)
        said = target["said"]
        wanted = full() + said["salt"] + said["step"] if found else full()
        assert torch.equal(local(target["model"]["rows"]), local(layout("rows", wanted, N)))
        tell(at, f"resumed {rank} {found.id if found else '-'} {said['step']}")
        salt = float(1000 * life.number)
        for step in range(said["step"] + 1, said["step"] + 1 + life.steps):
            pending = store.commit_async(state(salt, step), step=step)
            tell(at, f"durable {rank} {pending.wait(RUN_S).id} {step}")
            if rank == 0 and random.random() < 0.2 and not (at / "away").exists():
                tell(at, f"mirrored 0 {pending.wait(RUN_S, until='mirrored').id} {step}")
        dist.barrier()
    tell(at, f"ended {rank} - 0")
    dist.barrier()
    os._exit(0)


def tell(at: Path, line: str) -> None:
    with (at / "lines").open("a") as lines:
        lines.write(f"{line}\n")


def told(at: Path, what: str) -> list[list[str]]:
    with suppress(FileNotFoundError):
        lines = [line.split() for line in (at / "lines").read_text().splitlines()]
        return [words for words in lines if words and words[0] == what]
    return []


def play(folder: Path, seed: int, lives: int) -> set[str]:
    """Play the scenario `seed`; returns what happened in it."""
    random, happened = Random(seed), set[str]()
    every, keep = random.choice((1, 1, 2, 3)), random.choice((1, 2))
    for number in range(1, lives + 1):
        best = could_have(folder)
        (folder / "lines").unlink(missing_ok=True)
        killed = random.random() < 0.7
        steps = random.randint(2, 5)
        life = Life(number, folder, 1000 if killed else steps, every, keep)
        ranks = begin(life)
        try:
            until = time.monotonic() + RUN_S
            awaited = ("durable", N * steps) if killed else ("ended", N)
            while len(told(folder, awaited[0])) < awaited[1]:
                assert time.monotonic() < until, f"seed {seed}, life {number}: too slow"
                assert all(rank.exitcode in (None, 0) for rank in ranks), (seed, number)
                time.sleep(0.01)
        finally:
            for rank in ranks:
                rank.kill() if killed else rank.join(RUN_S)
                rank.join()
        check(folder, best, seed, number)
        for what, place in (("durable", "local"), ("mirrored", "mirror")):
            if acknowledged := told(folder, what):
                there = could_have(folder, places=(place,))
                last = int(acknowledged[-1][3])
                assert there and there[0] >= last, (seed, number, what, last, there)
        happened |= hurt(folder, random) | {"killed" if killed else "ended"}
    return happened


def begin(life: Life) -> Sequence[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ranks = [context.Process(target=live, args=(rank, life), daemon=True) for rank in range(N)]
    for rank in ranks:
        rank.start()
    return ranks


def check(folder: Path, best: tuple[int, str] | None, seed: int, number: int) -> None:
    """All ranks resumed one commit, no older than `best`."""
    resumed = told(folder, "resumed")
    assert len(resumed) == N and len({tuple(words[2:]) for words in resumed}) == 1, (seed, resumed)
    step, commit = int(resumed[0][3]), resumed[0][2]
    assert best is None or (step, commit) == best or step > best[0], (seed, number, best, resumed)


def could_have(folder: Path, places: Sequence[str] = ("local", "mirror")) -> tuple[int, str] | None:
    """The step and id of the newest commit that is whole here, or in a mirror that answers."""
    found = []
    for name in places:
        if name == "mirror" and (folder / "away").exists():
            continue
        with suppress(CkptStoreError), ckptstore.open(folder / name, read_only=True) as store:
            for info in store.log():
                with suppress(CkptStoreError):
                    store.checkout(info.id, verify="id").state_dict()
                    found.append((store.checkout(info.id).time, info.step or 0, info.id))
                    break
    return max(found)[1:] if found else None


def hurt(folder: Path, random: Random) -> set[str]:
    """What befalls the host between two lives."""
    (folder / "away").unlink(missing_ok=True)
    packs = sorted(path for path in (folder / "local" / "packs").rglob("*") if path.is_file())
    match random.choice(("nothing", "disk", "bit", "pack", "away", "away+bit")):
        case "disk":
            shutil.rmtree(folder / "local")
            return {"disk lost"}
        case "bit" | "away+bit" as what if packs:
            path = random.choice(packs)
            data = bytearray(path.read_bytes())
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            path.write_bytes(data)
            if what == "bit":
                return {"bit flipped"}
            (folder / "away").touch()
            return {"bit flipped", "mirror away"}
        case "pack" if packs:
            random.choice(packs).unlink()
            return {"pack lost"}
        case "away":
            (folder / "away").touch()
            return {"mirror away"}
    return set()
