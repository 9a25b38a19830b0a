"""Large plain values over several commits: what is read is what was committed, in each way, and one
entry more costs little."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore

NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
SCALARS = [0, 1, -1, True, False, None, 1.0, -0.0, NAN, float("inf"), 2**53, 2**53 + 1, -(2**70)]
SCALARS += ["", "é/ü", "\x00", "a" * 600, b"", b"\xff\x00", 2**31, -(2**31)]


def exact(value: Any) -> Any:
    """Equal for values of the same types and bits only."""
    if isinstance(value, float):
        return float, struct.pack(">d", value)
    if isinstance(value, dict):
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, map(exact, value)))
    if isinstance(value, list | tuple):
        return type(value), [exact(item) for item in value]
    return type(value), value


def drawn(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(9) if depth else 0
    some = [drawn(rng, depth - 1) for _ in range(rng.randrange(4))] if kind else []
    match kind:
        case 1:
            return some
        case 2:
            return tuple(some)
        case 3:
            return {f"k{i}": each for i, each in enumerate(some)}
        case 4:
            return frozenset(rng.sample(SCALARS[10:], 4))
        case 5:
            return set(rng.sample(range(10**6), rng.choice([3, 1100])))
    return rng.choice(SCALARS)


def edit(rng: random.Random, log: list[Any], seen: dict[Any, Any], ids: set[int]) -> None:
    at = rng.randrange(len(log))
    match rng.randrange(5):
        case 0:
            log.append(drawn(rng))
        case 1:
            log[at] = drawn(rng)
        case 2:
            log.insert(at, {"loss": rng.random()})
        case 3:
            del seen[next(iter(seen))]
    seen[f"new{rng.random()}"] = drawn(rng)
    ids ^= {rng.randrange(-(2**40), 2**40) for _ in range(3)}


@settings(max_examples=2)
@given(st.integers(0, 2**32), st.booleans())
def test_what_was_committed_is_read_after_any_edits(
    tmp_path_factory: pytest.TempPathFactory, seed: int, mixed: bool
) -> None:
    rng = random.Random(seed)
    log: list[Any] = [{"loss": rng.random(), "step": i} for i in range(1200)]
    if mixed:
        log[7] = drawn(rng)
    seen = {f"s/{i}": drawn(rng, 1) for i in range(1100)}
    ids = set(rng.sample(range(10**9), 1500))
    wanted = []
    storage = ckptstore.Storage(chunk_bytes=64 << 10)
    with ckptstore.open(tmp_path_factory.mktemp("plain") / "s", storage=storage) as store:
        for step in range(3):
            store.commit({"log": {"h": log, "seen": seen, "ids": ids}}, step=step)
            wanted.append(exact([log, seen, ids]))
            edit(rng, log, seen, ids)
        for step, want in enumerate(wanted):
            snap = store.checkout(step)
            state = snap.state_dict("log")
            assert exact([state["h"], state["seen"], state["ids"]]) == want
            if step < 2:
                continue
            target: dict[str, Any] = {"log": {"h": [], "seen": {}, "ids": set()}}
            snap.restore(target)
            found = target["log"]
            assert exact([found["h"], found["seen"], found["ids"]]) == want
            if not mixed and isinstance(state["h"][3], dict):
                read = snap.read("log/h/3/loss")
                assert exact(read) == exact(state["h"][3]["loss"])
        assert not store.fsck("data").findings


def append_row(state: Any) -> None:
    state.append({"loss": random.random(), "step": len(state)})


def append_float(state: Any) -> None:
    state.append(random.random())


def add_key(state: Any) -> None:
    state[f"new/{len(state)}"] = f"text {random.random()}"


def add_integer(state: Any) -> None:
    state.add(random.randrange(10**9))


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (lambda: [{"loss": random.random(), "step": i} for i in range(20_000)], append_row),
        (lambda: {f"s/{i}": f"text {random.random()}" for i in range(20_000)}, add_key),
        (lambda: [random.random() for _ in range(50_000)], append_float),
        (lambda: set(random.sample(range(10**9), 50_000)), add_integer),
    ],
)
def test_one_entry_more_adds_few_bytes_to_a_store(
    make: Callable[[], Any], more: Callable[[Any], None], tmp_path: Path
) -> None:
    random.seed(7)
    value, costs = make(), []
    with ckptstore.open(tmp_path / "s") as store:
        for step in range(34):
            store.commit({"log": {"h": value}}, step=step)
            costs.append(stored(tmp_path / "s"))
            if step:
                more(value)
    costs = [after - before for before, after in zip(costs, costs[1:], strict=False)]
    same, added = costs[0], sorted(costs[1:])
    assert added[len(added) // 2] - same <= 4096


def stored(place: Path) -> int:
    folders = ("packs", "log", "commits")
    return sum(
        file.stat().st_size
        for folder in folders
        for file in (place / folder).rglob("*")
        if file.is_file()
    )
