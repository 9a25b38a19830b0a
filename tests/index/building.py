"""Logs, footers and schemas for the tests, built without a store."""

import random
from collections.abc import Iterable
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from ckptstore.core.ids import CommitId, PackId, SessionId, StoreId
from ckptstore.core.model import Node, PackRecord, Schema
from ckptstore.log.entries import Body, Commit, Entry, Reduced, origin
from ckptstore.objects.pack import FOOTER_DTYPE

STORE = StoreId("5" * 32)
MODEL, OPTIMIZER = "d" * 64, "e" * 64


class LogBuilder:
    """Entries that follow one on the other, as `Log.read_entries` would give them."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._at = origin(STORE)
        self.entries: list[Entry] = []

    def append(self, *bodies: Body) -> Entry:
        for body in bodies:
            n = self._at.n + 1
            entry = Entry(
                n,
                "a" * 32,
                n * 1000,
                STORE,
                1,
                self._at.hash,
                self._at.bytes,
                body,
                self.digits(64),
                100 + n,
            )
            self._at = entry.position
            self.entries.append(entry)
        return self.entries[-1]

    def commit(
        self,
        *,
        run: str = "main",
        step: int | None = None,
        parents: Iterable[CommitId] = (),
        metrics: Iterable[tuple[str, float]] = (),
        tags: Iterable[str] = (),
        packs: Iterable[int] = (),
        reused: Iterable[int] = (),
        schemas: Iterable[tuple[str, str]] = (("model", MODEL),),
        id_: str | None = None,
    ) -> CommitId:
        """Append a commit and give its id; `packs` are numbers of new packs."""
        commit, session = CommitId(id_ or self.digits(64)), SessionId(self.digits(24))
        body = Commit(
            session,
            commit,
            self.digits(64),
            run,
            step,
            tuple(parents),
            "message",
            tuple(metrics),
            tuple(tags),
            tuple(record(number, session) for number in packs),
            frozenset(reused),
            tuple(schemas),
            logical_bytes=1000,
            new_bytes=10,
            leaves=3,
            document_bytes=500,
        )
        self.append(body)
        return commit

    def thin(self, replaces: CommitId) -> CommitId:
        """Append a commit that takes the place of another."""
        old = next(
            entry.body
            for entry in self.entries
            if isinstance(entry.body, Commit) and entry.body.commit == replaces
        )
        columns = {field.name: getattr(old, field.name) for field in fields(Commit)}
        commit, session = CommitId(self.digits(64)), SessionId(self.digits(24))
        columns |= {"commit": commit, "session": session, "packs": (), "tags": ()}
        self.append(Reduced(**columns, replaces=replaces, thinned=("a/*",), cast=()))
        return commit

    def digits(self, count: int) -> str:
        return "".join(self._random.choices("0123456789abcdef", k=count))


def record(number: int, session: str = "5" * 24) -> PackRecord:
    return PackRecord(PackId(f"{session}-0-{number}"), 4096 * number, number, False, number)


def pack_name(number: int) -> PackId:
    return PackId(f"{'7' * 24}-0-{number}")


def footer(chunks: int, seed: int) -> npt.NDArray[np.void]:
    """The footer of a pack of random chunks."""
    rng = np.random.default_rng(seed)
    table = np.zeros(chunks, FOOTER_DTYPE)
    table["chunk"] = np.frombuffer(rng.bytes(32 * chunks), "V32")
    table["raw"] = rng.integers(1, 1 << 20, chunks)
    table["stored"] = np.minimum(table["raw"], rng.integers(1, 1 << 20, chunks))
    table["offset"] = np.cumsum(table["stored"].astype(np.uint64)) + (1 << 33)
    table["codec"], table["width"] = rng.integers(0, 3, chunks), 2
    return table


def flat_schema(leaves: int) -> Schema:
    paths = tuple(f"model/layers.{i}.self_attn.q_proj.weight" for i in range(leaves))
    skeleton = Node("dict", tuple(range(leaves)), paths)
    return Schema(
        skeleton,
        paths,
        ("tensor",) * leaves,
        ("bfloat16",) * leaves,
        ((4096, 4096),) * leaves,
        (-1,) * leaves,
    )
