"""Data loaders of torchdata and samplers of torch come back on each rank, in the middle of an
epoch, and say so where they cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

import ckptstore
from tests.trainers.data_loader_training import SAMPLES
from tests.trainers.trainings import trained

TRAINING = "tests.trainers.data_loader_training"

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
"""torchdata 0.11 calls it."""


def test_the_same_ranks_read_what_is_left_of_the_epoch(tmp_path: Path) -> None:
    first = trained(TRAINING, tmp_path, ranks=2)
    rest = trained(TRAINING, tmp_path, ranks=2)
    assert all("refused" not in each and each["epoch"] == 7 for each in rest)
    assert sorted(n for each in first + rest for n in each["seen"]) == list(range(SAMPLES))


@pytest.mark.parametrize(("then", "now"), [(2, 4), (4, 2)])
def test_other_numbers_of_ranks_are_told_how_to_go_on(tmp_path: Path, then: int, now: int) -> None:
    trained(TRAINING, tmp_path, ranks=then)
    rest = trained(TRAINING, tmp_path, ranks=now)
    for each in rest:
        assert (
            f"loader is a data loader of {then} ranks, and there are {now} now" in each["refused"]
        )
        assert 'without=["loader"] leaves loader as it is' in each["refused"]
        assert each["unchanged"] and each["epoch"] == 7
    read = sorted(n for each in rest for n in each["seen"])
    assert read == list(range(SAMPLES)), "the epoch begins anew, and is whole"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("taken", [0, 1, 5, 12])
def test_a_loader_goes_on_after_any_batch(
    tmp_path: Path, workers: int, every: int, taken: int
) -> None:
    """Also before the first batch, between two snapshots of its workers, and at the epoch's end:
    then the next epoch comes."""

    def make() -> Any:
        order = StatefulRandomSampler(range(24), generator=torch.Generator().manual_seed(1))
        return StatefulDataLoader(
            list(range(24)),
            batch_size=2,
            sampler=order,
            num_workers=workers,
            snapshot_every_n_steps=every,
            generator=torch.Generator(),
        )

    loader = make()
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    with ckptstore.open(tmp_path / "store") as store:
        store.commit({"loader": loader}, step=1)
        wanted = [batch.tolist() for batch in (batches if taken < 12 else loader)]
        again = make()
        store.resume({"loader": again})
        found = [batch.tolist() for batch in again]
        assert (found or [batch.tolist() for batch in again]) == wanted
        store.resume({"loader": loader})
        found = [batch.tolist() for batch in loader]
        assert (found or [batch.tolist() for batch in loader]) == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_a_commit_in_the_background_has_the_place_of_its_call(tmp_path: Path, workers: int) -> None:
    loader: Any = StatefulDataLoader(list(range(16)), num_workers=workers)
    batches = iter(loader)
    next(batches)
    with ckptstore.open(tmp_path / "store") as store:
        pending = store.commit_async({"loader": loader}, step=1)
        wanted = [batch.tolist() for batch in batches]
        pending.wait()
        store.resume({"loader": loader})
        assert [batch.tolist() for batch in loader] == wanted


@pytest.mark.parametrize("sampler", [RandomSampler, DistributedSampler])
def test_samplers_of_torch_go_on_within_a_loader_of_torchdata(tmp_path: Path, sampler: Any) -> None:
    """They have no state: torchdata reads over what was taken, and the generator is the script's
    to commit."""
    options = {"num_replicas": 2, "rank": 1} if sampler is DistributedSampler else {}
    if sampler is RandomSampler:
        options = {"generator": torch.Generator().manual_seed(3)}
    order = sampler(range(16), **options)
    loader: Any = StatefulDataLoader(list(range(16)), sampler=order, num_workers=1)
    at_start = torch.Generator()
    if sampler is RandomSampler:
        at_start.set_state(order.generator.get_state())
    batches = iter(loader)
    next(batches)
    state = {"loader": loader, "order": at_start}
    with ckptstore.open(tmp_path / "store") as store:
        store.commit(state, step=1)
        wanted = [batch.tolist() for batch in batches]
        store.resume(state)
        if sampler is RandomSampler:
            order.generator.set_state(at_start.get_state())
        assert [batch.tolist() for batch in loader] == wanted


def test_a_loader_of_torch_itself_is_refused(tmp_path: Path) -> None:
    loader: Any = torch.utils.data.DataLoader(list(range(4)))
    with (
        ckptstore.open(tmp_path / "store") as store,
        pytest.raises(ckptstore.InvalidInput, match="loader"),
    ):
        store.commit({"loader": loader}, step=1)
