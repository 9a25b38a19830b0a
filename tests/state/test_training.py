"""Real optimizers, schedulers, scalers, averages and loaders resume in another process."""

from collections.abc import Iterator

import pytest
import torch

import ckptstore
from tests.state.fresh import Fresh
from tests.state.training import CASES, STEPS, Run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ckptstore.Store]:
    with ckptstore.open(tmp_path_factory.mktemp("training") / "store") as store:
        yield store


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which fight for the cores with whatever else
    runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch 2.6 itself
@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_in_another_process_goes_on_as_if_it_had_never_stopped(
    name: str, store: ckptstore.Store, fresh: Fresh
) -> None:
    run = Run(CASES[name], seed=1)
    run.train(STEPS)
    snap = store.commit(run.state, step=STEPS)
    wanted = [run.train(STEPS), run.digest()]
    # One run is new, the other has gone a way of its own and has tensors to be filled in place.
    for warm_up in (0, 3) if CASES[name].workers is None and not CASES[name].compiled else (0,):
        got = fresh.call("tests.state.training:resume", store.url, snap.id, name, warm_up)
        assert got[0] == wanted[0]
        assert got[1] == wanted[1]
