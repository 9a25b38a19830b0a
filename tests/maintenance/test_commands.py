"""fsck, repair, reindex and doctor as commands: output and exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckptstore.cli.main import main
from tests.maintenance.stores import copy_of, files, flip


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    return code, capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code, out = run(capsys, *words, "--json")
    return code, json.loads(out)


def test_a_whole_store_leaves_with_0(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "fsck", "--read-data", "-s", store)
    assert code == 0
    assert text.startswith("no damage: 5 log entries, 4 commits")
    assert run(capsys, "repair", "--read-data", "-s", store) == (0, "there is nothing to repair\n")


def test_damage_leaves_with_3_and_is_healed_by_apply(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = copy_of(store, tmp_path / "mirror")
    document = files(store, "commits")[0]
    document.unlink()
    code, found = answer(capsys, "fsck", "-s", store)
    assert (code, found["damaged"], found["damaged_commits"]) == (3, True, [document.name[25:]])
    assert found["findings"][0]["next"]
    code, planned = answer(capsys, "repair", "--from", mirror, "-s", store)
    assert (code, planned["applied"], len(planned["actions"])) == (3, False, 1)
    assert not document.exists()
    code, text = run(capsys, "repair", "--from", mirror, "--apply", "-s", store)
    assert code == 0
    assert f"put back commits/{document.name} from {mirror}" in text
    assert run(capsys, "fsck", "-s", store)[0] == 0


def test_a_damaged_config_keeps_only_others_from_working(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(store / "ckptstore.json", 40)
    assert run(capsys, "log", "-s", store)[0] == 3
    assert run(capsys, "fsck", "-s", store)[0] == 3
    assert run(capsys, "repair", "--apply", "-s", store)[0] == 0
    assert run(capsys, "log", "-s", store)[0] == 0


def test_reindex_says_what_the_indexes_hold(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, done = answer(capsys, "reindex", "-s", store)
    assert (code, done["entries"], done["commits"], done["packs"], done["unreadable"]) == (
        0,
        5,
        4,
        8,
        0,
    )


def test_doctor_names_every_check(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, done = answer(capsys, "doctor", "-s", store)
    assert code == 0
    assert {"write", "exclusive", "fsync", "space", "reserve"} <= {
        check["name"] for check in done["checks"]
    }


def test_where_there_is_no_store_all_leave_with_10(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("fsck", "repair", "reindex", "doctor"):
        assert run(capsys, command, "-s", tmp_path)[0] == 10


def test_an_amount_that_is_none_leaves_with_2(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "fsck", "--read-data=lots", "-s", store)[0] == 2
