"""`repair` never costs a commit: what restored before any damage handling restores afterwards,
unchanged."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

import ckptstore
from ckptstore.errors import CkptStoreError
from tests.maintenance.damages import States, damage, good, good_in_copy, make
from tests.maintenance.stores import heal
from tests.support.patching import small_chunks_too

FEW = 8
MANY = int(os.environ.get("CKPTSTORE_TEST_DAMAGED_STORES", "2000"))

Templates = Mapping[Path, States]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    folder = tmp_path_factory.mktemp("templates")
    found = {folder / codec: make(folder / codec, codec=codec) for codec in ("raw", "zstd")}
    with small_chunks_too():
        found[folder / "patched"] = make(folder / "patched", codec="raw")
    return found


def _repair(template: Path, states: States, scratch: Path, seed: str) -> tuple[int, int, int]:
    """Damage a copy of `template` and repair it. How many commits were good before and after, and
    whether repair raised an error."""
    random, store, mirrors = Random(seed), scratch / "store", []
    shutil.copytree(template, store)
    scenarios = damage(store, random)
    if random.random() < 0.15:
        mirrors.append(shutil.copytree(template, scratch / "mirror"))
        damage(mirrors[0], random)
    before = [good_in_copy(store, states, index=index) for index in (True, False)]
    refused, data = 0, random.random() < 0.7
    try:
        heal(store, *mirrors, data=data)
    except CkptStoreError as error:
        refused, scenarios = 1, f"{scenarios}; refused: {error}"
    bare, after = good_in_copy(store, states, index=False), good(store, states)
    for kind, was, now in (("its index", before[0], after), ("no index", before[1], bare)):
        lost = [states[commit]["step"] for commit in was - now]
        assert not lost, (
            f"with {kind}, steps {lost} restored before the repair and not after; seed {seed!r}: "
            f"{template.name}: {scenarios}"
        )
    if data and not refused:
        _assert_good_again(store, states, f"seed {seed!r}: {template.name}: {scenarios}")
    shutil.rmtree(store)
    shutil.rmtree(scratch / "mirror", ignore_errors=True)
    return len(before[0]), len(after), refused


def _assert_good_again(place: Path, states: States, what: str) -> None:
    """Commits to a store whose damage is known rely on none of it."""
    try:
        with ckptstore.open(place, run="again") as store:
            made = {store.commit(state).id: state for state in states.values()}
    except CkptStoreError:
        return  # what cannot be mended is not written to
    lost = [made[commit]["step"] for commit in made.keys() - good(place, made)]
    assert not lost, f"steps {lost} were committed again, and do not restore; {what}"


def _campaign(stores: int, templates: Templates, scratch: Path, seed: int) -> None:
    before = after = refused = 0
    for n in range(stores):
        template = list(templates)[n % len(templates)]
        result = _repair(template, templates[template], scratch, f"{seed} {n}")
        before, after, refused = before + result[0], after + result[1], refused + result[2]
    whole = sum(len(templates[list(templates)[n % len(templates)]]) for n in range(stores))
    print(
        f"{stores} damaged stores: of {whole} commits {before} were good before the repair, "
        f"{after} after; {refused} repairs refused"
    )
    assert after > before


def test_repair_never_costs_a_commit(templates: Templates, scratch: Path, seed: int) -> None:
    _campaign(FEW, templates, scratch, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousands_of_repairs_never_cost_a_commit(
    templates: Templates, scratch: Path, seed: int
) -> None:
    _campaign(MANY, templates, scratch, seed)
