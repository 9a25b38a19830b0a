"""A join refuses or mends on all ranks: none goes on alone."""

from pathlib import Path

from ckptstore.errors import CkptStoreError
from tests.distributed.pool import Pool


def joined(rank: int, folder: Path, name: str | None = None) -> str:
    """Join, commit once and tell how it ended; `name` is that of both hosts."""
    import torch

    import ckptstore
    from ckptstore.plugins.hosts import join

    try:
        place = join(folder / str(rank), host=name or f"host-{rank}", timeout_s=30)
        with ckptstore.open(place) as store:
            store.commit({"weights": torch.ones(3)}, step=1)
        return "committed"
    except CkptStoreError as error:
        return f"{type(error).__name__}: {error}"


def test_two_hosts_of_one_name_are_refused(pool: Pool, folder: Path) -> None:
    for said in pool.run(joined, folder, "localhost"):
        assert said.startswith("InvalidInput") and "a name of its own" in said


def test_a_damaged_configuration_is_replaced(pool: Pool, folder: Path) -> None:
    assert pool.run(joined, folder) == ["committed"] * 2
    config = folder / "0" / "ckptstore.json"
    intact = config.read_bytes()
    config.write_bytes(intact[:-9] + bytes([intact[-9] ^ 1]) + intact[-8:])
    assert pool.run(joined, folder) == ["committed"] * 2
    assert config.read_bytes() == intact
    for host in range(2):
        (folder / f"{host}" / "ckptstore.json").write_bytes(b"")
    for said in pool.run(joined, folder):
        assert said.startswith("Corrupt: join: facts failed on 1 of 2 ranks")


def test_a_log_that_no_host_has_intact_ends_the_join_of_all_ranks(pool: Pool, folder: Path) -> None:
    assert pool.run(joined, folder) == ["committed"] * 2
    for host in range(2):
        (folder / f"{host}" / "log" / f"{1:012d}").write_bytes(b"damaged")
    for said in pool.run(joined, folder):
        assert said.startswith("Corrupt: join: end failed on 1 of 2 ranks")
