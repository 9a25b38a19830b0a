"""What the page says of a tensor's numbers is what torch says, in bounded memory; downloads are
the tensor's bytes."""

import io
import math
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load

import ckptstore
from ckptstore.errors import Cancelled
from ckptstore.maintenance.retention import KeepLast
from ckptstore.plugins.ui import downloads, tensor_views
from ckptstore.plugins.ui.jobs import LEASE_S, Job, Jobs, Work
from ckptstore.plugins.ui.tensor_views import HeatMap, Histogram, regions
from tests.ui.asking import browsing

STATE = {
    "matrix": torch.randn(70, 130),
    "half": torch.randn(40, 3, 5).half(),
    "brain": torch.randn(33).bfloat16(),
    "eight": torch.randn(64).to(torch.float8_e4m3fn),
    "bad": torch.tensor([[1.0, math.nan, math.inf, 0.0], [-2.0, 0.0, 0.0, -math.inf]]),
    "all bad": torch.full((3,), math.nan),
    "long": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.tensor([3 + 4j, 0j]),
    "constant": torch.full((1000,), 2.5),
    "huge": torch.tensor([-1.7e308, 1e300, 0.0, 1.7e308], dtype=torch.float64),
    "all huge": torch.full((3,), 0.9e308, dtype=torch.float64),
    "tiny": torch.tensor([1e-200, -3e-200], dtype=torch.float64),
    "text": "no tensor",
}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tensors") / "s"
    with ckptstore.open(place) as store:
        store.commit({"model": STATE}, step=1)
    return place


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a few elements, so that each tensor is read in many."""
    monkeypatch.setattr(tensor_views, "SLICE_ELEMENTS", 50)
    monkeypatch.setattr(tensor_views.regions, "__defaults__", (50,))
    monkeypatch.setattr(downloads, "SLICE_BYTES", 200)


@pytest.mark.usefixtures("small_slices")
def test_statistics_are_those_of_torch(tensors: Path) -> None:
    with browsing(tensors) as browser:
        id_ = browser.view("store.json")["recent"][0]["id"]
        paths = browser.view(f"leaves/{id_}/0.json")["path"]
        for number, path in enumerate(paths):
            tensor = STATE[path.removeprefix("model/")]
            if not isinstance(tensor, torch.Tensor):
                continue
            _check(browser.view(f"tensor/{id_}/{number}.json"), tensor)


def _check(found: dict[str, Any], tensor: torch.Tensor) -> None:
    numbers = (tensor.abs() if tensor.is_complex() else tensor).double()
    finite = numbers[numbers.isfinite()]
    assert found["elements"] == numbers.numel()
    assert found["zeros"] == int((numbers == 0).sum())
    assert (found["nan"], found["inf"]) == (int(numbers.isnan().sum()), int(numbers.isinf().sum()))
    size = float(finite.abs().max()) if finite.numel() else 0.0
    finite = finite / (size or 1.0)  # torch overflows, too
    assert float(found["norm"]) == pytest.approx(float(finite.norm()) * size, rel=1e-6, abs=0)
    if not finite.numel():
        assert found["mean"] is found["histogram"] is None
        return
    size = size or 1.0
    assert found["mean"] / size == pytest.approx(float(finite.mean()), abs=1e-12)
    assert found["std"] / size == pytest.approx(float(finite.std(correction=0)), abs=1e-7)
    numbers = numbers[numbers.isfinite()]
    assert (found["min"], found["max"]) == (float(numbers.min()), float(numbers.max()))
    bins = found["histogram"]
    assert sum(bins["counts"]) == finite.numel() and 1 <= len(bins["counts"]) <= tensor_views.BINS
    assert math.isfinite(bins["low"]) and math.isfinite(bins["width"])
    assert bins["low"] <= found["min"]
    assert found["max"] / 2 <= bins["low"] / 2 + bins["width"] / 2 * len(bins["counts"]) * 1.001


def test_a_value_has_no_numbers(tensors: Path) -> None:
    with browsing(tensors) as browser:
        id_ = browser.view("store.json")["recent"][0]["id"]
        number = browser.view(f"leaves/{id_}/0.json")["path"].index("model/text")
        assert browser.view(f"leaf/{id_}/{number}.json")["value"] == "'no tensor'"
        answer = browser.ask(f"/data/0/tensor/{id_}/{number}.json")
        assert answer.status_code == 400 and "no numbers" in answer.json()["error"]
        assert browser.ask(f"/data/0/tensor/{id_}/99.json").status_code == 404


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.integers(1, 40))
def test_regions_cover_each_element_once_in_order(shape: tuple[int, ...], elements: int) -> None:
    tensor = np.arange(math.prod(shape)).reshape(shape)
    seen: list[int] = []
    for start, region in regions(shape, elements):
        part = tensor[region].reshape(-1)
        assert start == part[0] and 0 < part.size <= elements
        seen += part.tolist()
    assert seen == list(range(tensor.size))


@given(
    st.lists(
        st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20),
        min_size=1,
        max_size=6,
    )
)
@example([[0.0, 1.7928133516619584e16], [-1.0]])  # an edge that rounding moves past the least
@example([[-1e-177, 0.0, 0.0], [5e-324, -1e28], [-1e30]])  # and one past the most
def test_a_histogram_counts_every_number_whatever_the_order(parts: list[list[float]]) -> None:
    histogram, everything = Histogram(), [number for part in parts for number in part]
    for part in parts:
        histogram.add(np.array(part, np.float64))
    if not everything:
        return
    found = histogram.bins(min(everything), max(everything))
    assert sum(found["counts"]) == len(everything)
    assert found["low"] <= min(everything)


def test_a_heat_map_has_the_means_of_blocks_and_marks_bad_ones() -> None:
    tensor = np.arange(128.0 * 192.0).reshape(128, 192)
    tensor[127, 191] = np.nan
    heat = HeatMap((128, 192))
    for start in range(0, tensor.size, 1000):
        heat.add(start, tensor.reshape(-1)[start : start + 1000])
    cells = heat.cells()
    blocks = tensor.reshape(64, 2, 96, 2).mean(axis=(1, 3)).reshape(-1)
    assert cells[-1] is None and cells[:-1] == pytest.approx(blocks[:-1].tolist())


@pytest.mark.usefixtures("small_slices")
def test_downloads_are_the_tensors(tensors: Path) -> None:
    with browsing(tensors) as browser:
        id_ = browser.view("store.json")["recent"][0]["id"]
        leaves = browser.view(f"leaves/{id_}/0.json")
        for number, path in enumerate(leaves["path"]):
            tensor = STATE[path.removeprefix("model/")]
            npy = browser.ask(f"/download/0/{id_}/{number}.npy")
            one = browser.ask(f"/download/0/{id_}/{number}.safetensors")
            if not isinstance(tensor, torch.Tensor):
                assert (npy.status_code, one.status_code) == (400, 400)
                continue
            assert torch.equal(_bits(load(one.content)[path]), _bits(tensor))
            assert int(one.headers["content-length"]) == len(one.content)
            assert npy.status_code == (400 if path[6:] in ("brain", "eight") else 200)
            if npy.status_code == 200:
                assert np.array_equal(np.load(io.BytesIO(npy.content)), tensor.numpy(), True)
        some = browser.ask(f"/download/0/{id_}.safetensors?select=*a*")
        assert set(load(some.content)) == {p for p in leaves["path"] if "a" in p[6:]} - {""}
        assert "attachment" in some.headers["content-disposition"]
        assert browser.ask(f"/download/0/{id_}.safetensors?select=zzz").status_code == 404


def test_a_leaf_that_was_thinned_away_is_refused_before_a_download_begins(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s") as store:
        for step in range(4):
            weight = torch.full((30_000,), float(step))
            store.commit({"model": {"w": weight}, "optimizer": {"m": weight + 1}}, step=step)
        store.forget(KeepLast(1).thin("optimizer/**"))
        id_ = store.checkout(0).id
    with browsing(tmp_path / "s") as browser:
        for file in (f"{id_}/1.npy", f"{id_}/1.safetensors", f"{id_}.safetensors"):
            answer = browser.ask(f"/download/0/{file}")
            assert (answer.status_code, answer.json()["kind"]) == (404, "Thinned")
        rest = browser.ask(f"/download/0/{id_}.safetensors?select=model")
        assert torch.equal(load(rest.content)["model/w"], torch.zeros(30_000))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_a_job_that_nobody_asks_for_stops() -> None:
    now, seen = [0.0], []
    jobs = Jobs(clock=lambda: now[0])

    def work(job: Job) -> str:
        for step in range(10_000):
            seen.append(step)
            job.progress("counting", step, 10_000)
            if step == 5:
                now[0] += LEASE_S + 1
        return "done"

    with pytest.raises(Cancelled):
        _value(jobs, work)
    assert seen[-1] < 10
    assert jobs.ask("count", lambda job: "again") == {"value": "again"}
    jobs.close()


def _value(jobs: Jobs, work: Work) -> object:
    while "value" not in (found := jobs.ask("count", work)):
        pass
    return found["value"]


def test_a_job_tells_its_progress_and_part_of_its_value() -> None:
    begun, go_on = Event(), Event()
    jobs = Jobs()

    def work(job: Job) -> int:
        job.progress("halving", 1, 2)
        job.partial = [1]
        begun.set()
        assert go_on.wait(20)
        return 7

    jobs.ask("count", work)
    assert begun.wait(20)
    assert jobs.ask("count", work) == {"progress": ("halving", 1, 2), "partial": [1]}
    go_on.set()
    assert _value(jobs, work) == 7
    jobs.close()
