"""The path of a snapshot: the store that it leads to, and the commit that it means."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.cli.call import Exit
from ckptstore.interop.torchsnapshot import (
    Snapshot,
    StateDict,
)
from ckptstore.interop.torchsnapshot.locator import tag_of
from tests.cli.running import call
from tests.interop.test_snapshots import peer
from tests.support.servers.s3 import S3Server, new_url


def test_the_store_of_a_path_is_the_one_above_or_a_new_one_beside(tmp_path: Path) -> None:
    first = Snapshot.take(str(tmp_path / "runs" / "epoch_1"), {"s": StateDict(x=1)})
    assert sorted(path.name for path in (tmp_path / "runs").glob("epoch*")) == ["epoch_1"]
    Snapshot.take(f"fs://{tmp_path}/runs/exp7/epoch_2", {"s": StateDict(x=2)})
    with ckptstore.open(tmp_path / "runs") as store:
        assert set(store.tags()) == {"epoch_1", "exp7/epoch_2"}
        assert store.checkout("exp7/epoch_2").parents == (first.commit.id,)
        assert store.checkout(tmp_path / "runs" / "epoch_1").state_dict("s") == {"x": 1}
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.log").write_text("started")
    Snapshot.take(str(tmp_path / "work" / "last"), {"s": StateDict(x=3)})
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [
        ".ckptstore",
        "last",
        "train.log",
    ]
    assert Snapshot(str(tmp_path / "work" / "last")).read_object("0/s/x") == 3
    done = subprocess.run(
        [sys.executable, "-m", "ckptstore", "log"],
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Exit.OK and "last" in done.stdout


def test_a_directory_that_the_script_made_gets_the_pointer(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    path = str(tmp_path / "step_1")
    Snapshot.take(path, {"s": StateDict(x=1)})
    assert [entry.name for entry in (tmp_path / "step_1").iterdir()] == [".snapshot_metadata"]
    assert Snapshot(path).read_object("0/s/x") == 1


def test_a_path_that_is_taken_again_means_the_new_commit_and_the_old_one_stays(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "last")
    old = Snapshot.take(path, {"s": StateDict(x=1)}, step=1, metrics={"loss": 0.5})
    Snapshot.take(path, {"s": StateDict(x=2)}, step=2)
    assert Snapshot(path).read_object("0/s/x") == 2
    assert old.read_object("0/s/x") == 1, "a handle means the commit it was made with"
    assert (old.commit.step, old.commit.metrics) == (1, {"loss": 0.5})
    assert Snapshot(str(tmp_path / "1")).read_object("0/s/x") == 1, (
        "a path into the store may be any ref"
    )


def test_a_path_means_what_was_taken_last_however_it_was_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    for x in range(5):
        Snapshot.async_take(path, {"s": StateDict(x=-x)})
        Snapshot.take(path, {"s": StateDict(x=x)})
        assert Snapshot(path).read_object("0/s/x") == x


def test_deleting_the_file_does_not_delete_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    Snapshot.take(str(path), {"s": StateDict(x=1)})
    path.unlink()
    assert Snapshot(str(path)).read_object("0/s/x") == 1
    with ckptstore.open(tmp_path / "runs") as store:
        store.untag("a")
    with pytest.raises(ckptstore.NotFound, match="there is no snapshot at"):
        Snapshot(str(path)).get_manifest()


@pytest.mark.parametrize(
    "name",
    ["10", "latest", ".hidden", "epoch=3 loss=0.5", "a+b", "ü", "x" * 210, "a..b", "snapshot/1"],
)
def test_any_name_can_be_a_snapshots(tmp_path: Path, name: str) -> None:
    path = tmp_path / "runs" / name
    Snapshot.take(str(path), {"s": StateDict(x=name)})
    path.unlink()
    assert Snapshot(str(path)).read_object("0/s/x") == name
    names = [
        "10",
        "snapshot/10",
        "a+b",
        "a=b",
        "a+2Bb",
        "a+3Db",
        "latest",
        "é",
        "+C3+A9",
        "y" * 201,
        "y" * 202,
    ]
    assert len(set(map(tag_of, names))) == len(names)


def test_what_else_lies_at_a_path_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"precious")
    with pytest.raises(ckptstore.Conflict, match="is there and is not a snapshot of ckptstore"):
        Snapshot.take(str(tmp_path / "weights.pt"), {"s": StateDict()})
    assert (tmp_path / "weights.pt").read_bytes() == b"precious"
    Snapshot.take(str(tmp_path / "runs" / "a"), {"s": StateDict()})
    for name in ("log", "packs/x", "ckptstore.json"):
        with pytest.raises((ckptstore.InvalidInput, ckptstore.Conflict)):
            Snapshot.take(str(tmp_path / "runs" / name), {"s": StateDict()})
    with pytest.raises(ckptstore.InvalidInput, match="is a store"):
        Snapshot.take(str(tmp_path / "runs"), {"s": StateDict()})


def test_a_directory_of_torchsnapshot_is_told_from_a_snapshot(tmp_path: Path) -> None:
    with peer() as torchsnapshot:
        torchsnapshot.Snapshot.take(
            str(tmp_path / "old"), {"s": torchsnapshot.StateDict(x=torch.ones(3))}
        )
    with pytest.raises(ckptstore.InvalidInput, match=r"ckptstore import .*old --tag old"):
        Snapshot(str(tmp_path / "old")).restore({"s": StateDict()})
    with pytest.raises(ckptstore.Conflict):
        Snapshot.take(str(tmp_path / "old"), {"s": StateDict()})
    store = str(tmp_path / "runs")
    assert call("init", store).code == Exit.OK
    assert call("-s", store, "import", str(tmp_path / "old"), "--tag", "old").code == Exit.OK
    assert torch.equal(Snapshot(f"{store}/old").read_object("0/s/x"), torch.ones(3))


def test_a_bucket_holds_snapshots_too(s3: S3Server) -> None:
    url, options = new_url(), s3.options()
    snapshot = Snapshot.take(
        f"{url}/runs/a", {"s": StateDict(w=torch.ones(4))}, storage_options=options
    )
    assert (
        Snapshot.take(
            f"{url}/runs/deep/b", {"s": StateDict(w=torch.ones(4))}, storage_options=options
        ).commit.new_bytes
        == 0
    )
    assert torch.equal(
        Snapshot(f"{url}/runs/a", storage_options=options).read_object("0/s/w"), torch.ones(4)
    )
    assert snapshot.commit.tags == ("a",)


def test_a_store_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    for x in (1, 2):
        Snapshot.take(str(tmp_path / "runs" / "a"), {"s": StateDict(x=x)})
        assert Snapshot(str(tmp_path / "runs" / "a")).read_object("0/s/x") == x
        subprocess.run(["rm", "-r", str(tmp_path / "runs")], check=True)
    assert not os.path.lexists(tmp_path / "runs")
