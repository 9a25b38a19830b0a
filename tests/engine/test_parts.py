"""Commits of parts: what their writers hand in must fit together before the log is asked."""

import time
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore.engine.commit import extent_of
from ckptstore.engine.label import Label
from ckptstore.engine.parts import Part
from ckptstore.engine.publish import TreeContent
from ckptstore.errors import InvalidInput
from ckptstore.state.flatten import flatten


def test_writers_that_take_each_other_s_number_are_found_before_the_log_names_their_packs(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "store") as store:
        session = store.parts.open()
        written = []
        for value in (1.0, 2.0):
            flat = flatten({"model": {"weight": torch.full((300_000,), value)}})["model"]
            part = Part(extent_of(flat, 0), flat.leaves[0], flat.leaves[0].nbytes)
            written.append((flat, store.parts.write(session.id, 0, [part])))
        trees = [TreeContent(str(i), flat.schema, each.contents) for i, (flat, each) in enumerate(written)]
        with pytest.raises(InvalidInput, match="each needs a rank of its own"):
            store.parts.publish(session, Label("main"), trees, None, [each.receipt for _, each in written], time.perf_counter())
        assert store.log() == []
