"""What `init`, `which`, `tag`, `migrate` and `completion` do, and where a command finds its
store."""

import os
import platform
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

import ckptstore
from ckptstore.core.config import FORMAT_VERSION
from ckptstore.repository.store_handle import CATALOG_NAME
from tests.cli.running import call, environment, run, run_on_terminal


def test_init_makes_an_empty_store_with_what_was_chosen(tmp_path: Path) -> None:
    made = run("init", "new/store", "--chunk-size", "64KiB", "--codec", "zstd", cwd=tmp_path)
    assert (made.code, made.err) == (0, "")
    assert (
        f"created an empty store at {tmp_path}/new/store (chunks of 64.0 KiB, codec zstd)"
        in made.out
    )
    stats = call("stats", "--json", "-s", str(tmp_path / "new/store")).document
    assert (stats["chunk_bytes"], stats["codec"], stats["commits"], stats["dedup_ratio"]) == (
        65_536,
        "zstd",
        0,
        None,
    )


def test_init_says_in_json_what_it_made(tmp_path: Path) -> None:
    document = run("init", "--json", cwd=tmp_path).document
    assert (document["store"], document["chunk_bytes"], document["codec"]) == (
        str(tmp_path),
        1 << 20,
        "raw",
    )


def test_an_empty_store_answers_every_query(tmp_path: Path) -> None:
    call("init", str(tmp_path))
    for words in ("log", "tag", "stats"):
        result = call(words, "-s", str(tmp_path))
        assert (result.code, result.err) == (0, ""), words
    assert call("log", "--json", "-s", str(tmp_path)).document["commits"] == []
    assert "the store has no commits" in call("show", "-s", str(tmp_path)).err


def test_a_tag_is_set_moved_and_removed(store: Path) -> None:
    place = str(store)
    assert call("tag", "champion", "100", "-s", place).out.startswith("champion is ")
    moved = call("tag", "champion", "tune@latest", "-s", place).out
    assert "(step 220) of run tune, was " in moved
    with ckptstore.open(store) as opened:
        assert opened.checkout("champion").step == 220
    removed = call("tag", "-d", "champion", "prod", "--json", "-s", place).document["removed"]
    assert list(removed) == ["champion", "prod"]
    assert call("tag", "--names", "-s", place).out.split() == ["best", "tune/first"]


def test_a_tag_is_renamed_in_one_step(store: Path) -> None:
    at = ("tag", "-s", str(store))
    commit = {tag["name"]: tag["commit"] for tag in call(*at, "--json").document["tags"]}
    renamed = call(*at, "--rename", "prod", "production", "--json").document
    assert (renamed["tag"], renamed["renamed"], renamed["commit"]) == (
        "production",
        "prod",
        commit["prod"],
    )
    assert (
        call(*at, "-m", "best", "champion").out == f"champion is {commit['best'][:12]}, was best\n"
    )
    names = ["champion", "production", "tune/first"]
    assert call(*at, "--names").out.split() == names
    assert call(*at, "--rename", "champion", "champion").code == 0
    refused = (
        (("--rename", "champion", "production"), 1, "names another commit"),
        (("--rename", "champ", "x"), 1, "no tag 'champ'; did you mean 'champion'?"),
        (("--rename", "champion"), 2, "its new name"),
        (("--rename", "champion", "a b"), 2, "a b"),
        (("--rename", "champion", "x", "-d", "champion"), 2, "-d removes tags"),
    )
    for words, code, says in refused:
        result = call(*at, *words)
        assert (result.code, says in result.err) == (code, True), result.err
    assert call(*at, "--names").out.split() == names


def test_what_is_tagged_or_signed_is_what_the_log_says_and_not_the_catalog(
    store: Path, tmp_path: Path
) -> None:
    place, key = str(store), str(tmp_path / "key")
    assert call("sign", "--new-key", key, "-s", place).code == 0
    with ckptstore.open(store) as opened:
        wanted, other = opened.tags()["best"], opened.tags()["prod"]
    assert call("tag", "--names", "-s", place).code == 0
    with closing(sqlite3.connect(store / "index" / CATALOG_NAME)) as catalog, catalog:
        catalog.execute("UPDATE tags SET commit_id = ? WHERE name = 'best'", (other,))
    assert call("sign", "best", "--key", key, "--json", "-s", place).document["commit"] == wanted
    verified = call("verify", "best", "--keys", f"{key}.pub", "--json", "-s", place).document
    assert verified["commit"] == wanted
    assert call("tag", "again", "best", "--json", "-s", place).document["commit"] == wanted


def test_removing_tags_is_all_or_nothing(store: Path) -> None:
    result = call("tag", "-d", "best", "bets", "-s", str(store))
    assert result.code == 1
    assert "no tag 'bets'; did you mean 'best'?; nothing was removed" in result.err
    assert "best" in call("tag", "--names", "-s", str(store)).out.split()


def test_migrate_says_what_it_did(store: Path) -> None:
    catalog = store / "index" / "catalog.sqlite"
    assert "is up to date" in call("migrate", "-s", str(store)).out
    for path in catalog.parent.glob("catalog.sqlite*"):
        path.unlink()
    assert "was made" in call("migrate", "-s", str(store)).out
    with sqlite3.connect(catalog) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    document = call("migrate", "--json", "-s", str(store)).document
    assert (document["before"], document["after"], document["commits"]) == (
        "9999",
        document["wanted"],
        5,
    )


@pytest.mark.parametrize(
    "words",
    [
        ["-s", "PLACE", "log"],
        ["log", "-s", "PLACE"],
        ["log", "--store=PLACE"],
        ["--store", "PLACE", "log", "-n1"],
    ],
)
def test_the_store_is_named_before_or_after_the_command(made_store: Path, words: list[str]) -> None:
    result = run(
        *(word.replace("PLACE", str(made_store)) for word in words), env={"CKPTSTORE": "/nowhere"}
    )
    assert (result.code, result.err) == (0, "")


def test_the_store_is_the_variable_s_or_the_nearest_around(
    made_store: Path, tmp_path: Path
) -> None:
    assert run("log", cwd=tmp_path, env={"CKPTSTORE": str(made_store)}).code == 0
    assert run("log", cwd=made_store / "packs").code == 0
    assert run("log", cwd=tmp_path).code == 10
    assert (
        f"there is one in {made_store.name}: name it with -s {made_store.name}"
        in run("log", cwd=made_store.parent).err
    )


def test_a_store_that_was_found_above_is_named_on_a_terminal(
    made_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"store: {made_store}, found above"
    monkeypatch.chdir(made_store / "packs")
    shown = run_on_terminal("log", "-n1", env={"NO_COLOR": "1"}).out
    assert shown.splitlines()[0] == said
    assert said not in run_on_terminal("log", "-n1", "--json").out
    assert said not in run_on_terminal("log", "-n1", "-s", str(made_store)).out
    assert said not in run("log", "-n1").out
    monkeypatch.chdir(made_store)
    assert "found" not in run_on_terminal("log", "-n1").out


def test_which_prints_the_store_and_where_it_was_found(
    made_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(made_store)
    monkeypatch.chdir(made_store / "packs")
    assert run("which").out == f"{place}\n"
    assert run_on_terminal("which", env={"NO_COLOR": "1"}).out == f"{place}\nfound above\n"
    assert call("which", "--json").document["found"] == "above"
    monkeypatch.chdir(made_store)
    assert call("which", "--json").document["found"] == "here"
    monkeypatch.chdir(tmp_path)
    assert call("which", "--json", "-s", place).document["found"] == "-s"
    assert call("which").code == 10
    assert call("which", "-s", str(tmp_path)).code == 10
    monkeypatch.setenv("CKPTSTORE", place)
    document = call("which", "--json").document
    with ckptstore.open(made_store) as store:
        assert (document["found"], document["store_id"]) == ("$CKPTSTORE", store.id)
        assert document["store"] == store.url


def test_the_options_of_all_commands_may_stand_before_or_behind(made_store: Path) -> None:
    before, behind = (
        call(*words, "-s", str(made_store)).document
        for words in (["--json", "tag"], ["tag", "--json"])
    )
    assert before == behind


def test_version_and_help_need_no_store(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).out == f"ckptstore {ckptstore.__version__}\n"
    for words in (["--version", "--json"], ["--json", "--version"]):
        said = run(*words, cwd=tmp_path).document
        assert (said["ckptstore"], said["format"]) == (ckptstore.__version__, FORMAT_VERSION)
        assert said["python"] == platform.python_version() and said["platform"]
        assert said["libraries"]["blake3"] == version("blake3")
        assert said["libraries"].keys() >= {"torch", "s3fs", "obstore", "psycopg"}
    for words in ([], ["log"], ["completion"]):
        result = call(*words, "--help")
        assert (result.code, result.err) == (0, "")
        assert "usage: ckptstore" in result.out


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("l", {"log", "ls"}),
        ("log --gr", {"--graph"}),
        ("tag -d b", {"best"}),
        ("show tune", {"tune/first"}),
    ],
)
def test_bash_completes_commands_options_and_tags(
    made_store: Path, tmp_path: Path, line: str, completed: set[str]
) -> None:
    script = tmp_path / "completion"
    script.write_text(run("completion", "bash").out)
    words = line.split()
    ask = (
        f"source {script}; COMP_WORDS=(ckptstore {line}); COMP_CWORD={len(words)}; "
        f"_shtab_ckptstore; echo ${{COMPREPLY[@]}}"
    )
    # where this environment's `ckptstore` is
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment({"CKPTSTORE": str(made_store), "PATH": path})
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, env=env, check=False)
    assert set(done.stdout.split()) == completed


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_too(shell: str) -> None:
    result = call("completion", shell)
    assert (result.code, result.err) == (0, "")
    assert "ckptstore tag --names" in result.out
