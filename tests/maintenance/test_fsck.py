"""fsck finds each problem at its level, names it, and reports nothing for a sound store."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import ckptstore
from ckptstore.core.ids import PackId, pack_key, twin_key
from ckptstore.errors import InvalidInput
from ckptstore.log import entries
from ckptstore.log.state import Pack, State
from ckptstore.maintenance.check import Kind, Level, Severity, Share, data, parse_share
from ckptstore.maintenance.check.data import choose
from ckptstore.repository.store_handle import StoreHandle
from tests.maintenance.stores import check, files, flip, large_state, make_store


def state_of(store: Path) -> State:
    handle = StoreHandle(store)
    try:
        return handle.log.replay()
    finally:
        handle.close()


@pytest.mark.parametrize("level", list(Level))
def test_a_whole_store_has_no_findings(store: Path, level: Level) -> None:
    report = check(store, level)
    assert report.findings == ()
    assert not report.damaged
    assert report.looked.entries == 5


def test_a_level_has_a_name(store: Path) -> None:
    with ckptstore.open(store) as opened:
        assert opened.fsck("packs").level is Level.PACKS
        with pytest.raises(InvalidInput, match="wanted refs, connectivity, packs, data"):
            opened.fsck("all")


def test_a_changed_log_entry_is_found_at_the_first_level(store: Path) -> None:
    flip(store / "log" / "000000000002", 80)
    report = check(store, Level.REFS)
    assert (Kind.ENTRY, 2) in {(finding.kind, finding.entry) for finding in report.findings}
    assert report.damaged


def test_a_removed_log_entry_is_found_wherever_it_was(store: Path) -> None:
    for n in range(1, 6):
        path = store / "log" / f"{n:012d}"
        data = path.read_bytes()
        path.unlink()
        report = check(store, Level.REFS)
        assert any(finding.entry == n for finding in report.findings), f"entry {n}"
        path.write_bytes(data)


def test_an_exchanged_log_entry_is_found_by_what_its_successor_says(
    store: Path, tmp_path: Path
) -> None:
    other = make_store(tmp_path / "other")
    config = (store / "ckptstore.json").read_bytes()
    assert config != (other / "ckptstore.json").read_bytes()
    (store / "log" / "000000000002").write_bytes((other / "log" / "000000000002").read_bytes())
    assert [
        f.entry for f in check(store, Level.REFS).findings if f.kind is Kind.ENTRY and f.entry
    ] == [2]


def test_a_missing_pack_names_the_leaf_and_the_commits(store: Path) -> None:
    _, pack = min(
        (number, pack) for number, pack in state_of(store).packs.items() if not pack.metadata
    )
    (store / pack_key(pack.id)).unlink()
    report = check(store, Level.CONNECTIVITY)
    lost = {finding.leaf: finding for finding in report.findings if finding.kind is Kind.CHUNK}
    assert lost.keys() == {"model/frozen", "model/weight"}
    assert len(lost["model/frozen"].commits) == 4
    assert len(lost["model/weight"].commits) == 1
    assert any(finding.pack == pack.id for finding in report.findings)
    assert len(report.damaged_commits) == 4


def test_a_lost_twin_is_found_at_the_third_level_and_costs_nothing(store: Path) -> None:
    pack = next(pack for pack in state_of(store).packs.values() if pack.metadata)
    (store / twin_key(pack.id)).unlink()
    assert check(store, Level.CONNECTIVITY).findings == ()
    (finding,) = check(store, Level.PACKS).findings
    assert (finding.kind, finding.pack, finding.key) == (Kind.TWIN, pack.id, twin_key(pack.id))
    assert not check(store, Level.PACKS).damaged_commits


def test_a_flipped_bit_in_a_chunk_is_found_at_the_last_level_only(store: Path) -> None:
    pack = next(pack for pack in state_of(store).packs.values() if not pack.metadata)
    flip(store / pack_key(pack.id), 5)
    assert check(store, Level.PACKS).findings == ()
    (finding,) = check(store, Level.DATA).findings
    assert (finding.kind, finding.pack) == (Kind.CHUNK, pack.id)
    assert finding.leaf in {"model/frozen", "model/weight"}
    assert finding.commits
    assert finding.chunk is not None
    assert finding.chunk.hex()[:12] in finding.what


def test_a_damaged_document_names_its_commit(store: Path) -> None:
    path = files(store, "commits")[0]
    flip(path, 30)
    (finding,) = check(store).findings
    assert (finding.kind, *finding.commits) == (Kind.DOCUMENT, path.name[25:])


def test_what_only_forgotten_commits_need_is_a_note(store: Path) -> None:
    with ckptstore.open(store) as opened:
        opened.untag("first")
    handle = StoreHandle(store)
    commit = next(c for c, row in handle.log.replay().commits.items() if row.step == 0)
    session = handle.log.state.commits[commit].session
    handle.log.append(entries.Forget((commit,), "test"))
    handle.close()
    (store / "commits" / f"{session}-{commit}").unlink()
    (finding,) = check(store).findings
    assert (finding.kind, finding.severity) == (Kind.DOCUMENT, Severity.NOTE)


def test_objects_that_no_entry_names_are_notes(store: Path) -> None:
    (store / "packs" / "ab").mkdir(exist_ok=True)
    (store / "packs" / "ab" / f"ab{'0' * 22}-0-0").write_bytes(b"left behind")
    (store / "packs" / "ab" / "holiday.jpg").write_bytes(b"not ours")
    report = check(store)
    assert {finding.kind for finding in report.findings} == {Kind.ORPHAN, Kind.FOREIGN}
    assert not report.damaged


_ID = f"'{'5' * 64}'"
SPOILED = {
    "commits": {
        **dict.fromkeys(("run", "session", "message"), "'third'"),
        **dict.fromkeys(("n", "step", "time_ns", "logical_bytes", "new_bytes", "leaves"), "77"),
        **dict.fromkeys(("id", "content"), _ID),
        "place": "0",
        "forgotten": "1 - forgotten",
        "thinned": """'["model/**"]'""",
        "lossy": """'[["model/**", "bfloat16"]]'""",
    },
    "metrics": {"name": "'other'", "value": "77"},
    "parents": {"parent": _ID},
    "commit_trees": {"key": "key || 'x'"},
    "tags": {"name": "'other'", "commit_id": "(SELECT id FROM commits WHERE step = 2)"},
    "schemas": {"data": "x'77'", "id": _ID},
    "position": {"hash": _ID, "bytes": "77"},
    "packs": {"bytes": "77", "chunks": "77", "condemned": "1", "metadata": "1 - metadata"},
}
"""Another value for columns of the catalog."""


@pytest.mark.parametrize(
    ("table", "column"), [(table, column) for table in SPOILED for column in SPOILED[table]]
)
def test_what_the_catalog_says_is_compared_with_the_log(
    store: Path, table: str, column: str
) -> None:
    with closing(sqlite3.connect(store / "index" / "catalog.sqlite")) as connection:
        ((_, key, *_), *_) = connection.execute(f"PRAGMA table_info({table})").fetchall()
        changed = connection.execute(
            f"UPDATE {table} SET {column} = {SPOILED[table][column]} "
            f"WHERE {key} = (SELECT max({key}) FROM {table})"
        )
        assert changed.rowcount > 0
        connection.commit()
    assert {finding.kind for finding in check(store, Level.REFS).findings} == {Kind.CATALOG}


def test_reading_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", steps=4, states=large_state)
    total = check(store).looked.stored_bytes
    seen: set[str] = set()
    for _ in range(20):
        report = check(store, share=Share(percent=20))
        assert 0 < report.looked.data_bytes < total
        record = data.load_record(store / "index", state_of(store).store)
        seen |= set(record)
        if len(seen) == report.looked.packs:
            return
    raise AssertionError("some packs are never read")


def test_packs_are_chosen_by_how_long_ago_they_were_verified() -> None:
    packs = [_pack(str(i), 100) for i in range(4)]
    verified, suspects = {packs[0].id: 50, packs[1].id: 20}, {packs[0].id}
    chosen = [pack.id for pack in choose(packs, verified, suspects, Share(bytes=250))]
    assert chosen == [packs[2].id, packs[3].id, packs[1].id, packs[0].id]
    assert [pack.id for pack in choose(packs, verified, suspects, Share(percent=25))] == [
        packs[2].id,
        packs[0].id,
    ]


def test_a_damaged_record_of_what_was_verified_is_ignored(store: Path) -> None:
    check(store, Level.DATA)
    name = state_of(store).store
    for text in (
        "",
        "[]",
        '{"store": 1}',
        '["x", {}]',
        f'["{name}", 3]',
        f'["{name}", {{"p": []}}]',
    ):
        (store / "index" / data.RECORD_NAME).write_text(text)
        assert data.load_record(store / "index", name) == {}
    assert check(store, Level.DATA).findings == ()


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("5%", Share(percent=5)),
        ("10G", Share(bytes=10 << 30)),
        ("1.5k", Share(bytes=1536)),
        ("12", Share(bytes=12)),
    ],
)
def test_an_amount_of_data_is_parsed(text: str, share: Share) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "%", "-5%", "101%", "0", "nan", "G", "5x", "inf"])
def test_an_invalid_amount_of_data_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_share(text)


def _pack(name: str, size: int) -> Pack:
    return Pack(PackId(f"{name * 24}-0-0"), size, 1, False, True, 1)
