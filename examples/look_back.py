"""What a store remembers: the log, the best commit, what changed between two, and one tensor out of
an old one."""

import tempfile

import torch

import ckptstore

with (
    tempfile.TemporaryDirectory() as folder,
    ckptstore.open(folder + "/store", run="example") as store,
):
    state = {"model": {"frozen": torch.randn(512, 512), "head": torch.randn(16, 512)}}
    for step, loss in enumerate([0.9, 0.4, 0.6]):
        state["model"]["head"] += 1
        store.commit(state, step=step, metrics={"loss": loss}, message=f"epoch {step}")

    for info in store.log():
        print(
            f"{info.id[:12]} step {info.step} {info.metrics} {info.new_bytes:,} new bytes of "
            f"{info.logical_bytes:,}"
        )

    store.tag("release", "best:loss")
    print("the best step:", store.checkout("release").step)

    print("changed between the first and the last:", store.diff(0, 2))

    old_rows = store.checkout(0).read("model/head", region=(slice(0, 2),))
    print("two rows of an old tensor:", tuple(old_rows.shape))
