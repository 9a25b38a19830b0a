"""The benchmarks measure what they say: who takes turns how, which bytes change, what a ratio is,
where they refuse to run."""

import mmap
from pathlib import Path
from statistics import median

import pytest
import torch
from fsspec.core import url_to_fs

from benchmarks import disk, limits, report, states
from benchmarks.measure import Entrant, Result, Series, alternate, ratio
from benchmarks.results import Record, load, save
from benchmarks.s3 import bucket_of_a_case
from benchmarks.targets import Target
from tests.support.servers.proxy import proxy_to
from tests.support.servers.s3 import S3Server


def result(**series: list[float]) -> Result:
    return Result(
        "case", "a case", "s", 0, {name: Series(values, values) for name, values in series.items()}
    )


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    assert ratio(result(a=[1.0, 4.0, 9.0], b=[1.0, 2.0, 3.0]), "a", "b") == 2.0


def test_entrants_take_turns_in_random_order_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    entrants = [Entrant(name, lambda name=name: order.append(name)) for name in "abc"]
    series = alternate("case", entrants, rounds=20)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 21 and {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) == 6, "all orders occur"
    assert [len(its.values) for its in series.values()] == [20, 20, 20]


def test_the_kernels_part_and_fresh_memory_are_noted() -> None:
    """Pages are asked of the kernel: an allocator may still have what a test before it freed."""
    held: list[mmap.mmap] = []

    def touch() -> None:
        held.append(mmap.mmap(-1, 64 << 20))
        held[0].write(bytes(64 << 20))

    take = Entrant("take", touch, after=held.clear)
    its = alternate("case", [take, Entrant("rest", lambda: None)], rounds=3)
    assert min(its["take"].faults) > max(its["rest"].faults)
    both = zip(its["take"].system_seconds, its["take"].cpu_seconds, strict=True)
    assert all(system <= cpu + 1e-9 for system, cpu in both)  # differences of floats
    assert median(its["take"].system_seconds) > 0
    assert len(its["take"].fresh_bytes) == 3


@pytest.mark.parametrize(("target", "holds"), [
    (Target("case", "fast enough", "b", at_least=1.5, ours="a"), True),
    (Target("case", "not fast enough", "b", at_least=2.5, ours="a"), False),
    (Target("case", "slow enough", "a", at_most=2.5, ours="b"), True),
    (Target("case", "small enough", at_most=1.0, ours="a"), True),
    (Target("case", "too large", at_most=1.0, ours="b"), False),
])  # fmt: skip
def test_a_target_says_whether_a_result_keeps_it(target: Target, holds: bool) -> None:
    assert target.holds(result(a=[1.0, 1.0], b=[2.0, 2.0])) is holds


def test_the_gpt_has_171_tensors_and_the_right_size() -> None:
    state = states.gpt(1 / 128)
    assert len(state.tensors) == 171
    assert (
        state.app["optimizer"]["exp_avg"]["layers.0.norm1.bias"]
        is state.tensors["optimizer/exp_avg/layers.0.norm1.bias"]
    )
    full = dict(states._layer_shapes(states.WIDTH))
    parameters = (
        sum(torch.Size(shape).numel() for shape in full.values()) + states.VOCABULARY * states.WIDTH
    )
    assert parameters * 3 * 4 == 1_450_524_672


def test_one_percent_of_the_bytes_change() -> None:
    state = states.gpt(1 / 8)
    before = {path: tensor.clone() for path, tensor in state.tensors.items()}
    states.change_one_percent(state, step=3)
    changed = sum(int((tensor != before[path]).sum()) * 4 for path, tensor in state.tensors.items())
    assert 0.008 < changed / state.nbytes < 0.0101


def test_the_limits_write_and_read_every_byte(tmp_path: Path) -> None:
    state, into = states.gpt(1 / 64), states.blank(states.gpt(1 / 64))
    limits.read(limits.write(state, tmp_path), into, hashed=limits.xxh3)
    states.require_equal(state, into, "limit")


def test_a_restore_of_something_else_is_found_out() -> None:
    state = states.tiny(1e-9)
    with pytest.raises(RuntimeError, match="nobody did not restore 10 of 10"):
        states.require_equal(state, states.blank(state), "nobody")


def test_memory_is_refused_as_a_place() -> None:
    memory = Path("/dev/shm")
    if disk.filesystem(memory) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.raises(SystemExit, match="pass --dir with a folder on a disk"):
        disk.work_dir(memory)


def test_a_case_goes_to_its_own_bucket_after_another_case_had_one(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers find the server in the environment, and fsspec remembers what it made there for another
    case."""
    monkeypatch.setenv("CKPTSTORE_TEST_S3_KEY", s3.key)
    monkeypatch.setenv("CKPTSTORE_TEST_S3_SECRET", s3.secret)
    for content in (b"first", b"second"):
        with proxy_to(s3.address) as server:
            monkeypatch.setenv("CKPTSTORE_TEST_S3", server.endpoint)
            with bucket_of_a_case() as there:
                fs, place = url_to_fs(there.new_url())
                fs.pipe_file(place, content)
                assert (
                    there.client()
                    .get_object(Bucket=there.name, Key=place.partition("/")[2])["Body"]
                    .read()
                    == content
                )


def test_a_record_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    record = Record(result(a=[1.0], b=[2.0]), 1, {"load": 0.5})
    save(tmp_path, record)
    assert load(tmp_path, "case") == record
    assert load(tmp_path, "another") is None


def test_the_table_divides_by_its_first_row() -> None:
    lines = report.case_table(result(ours=[0.5, 0.5], other=[1.0, 2.0])).splitlines()
    assert lines[2:] == ["| ours | 500 ms | 1.00 |", "| other | 1.50 s | 3.00 |"]
