"""What `log`, `show`, `ls`, `diff`, `tag` and `stats` answer: in a pipe and as JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from tests.cli.conftest import LEAVES
from tests.cli.running import call, run

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"

NUMBER = (int, float, str)  # a metric; NaN and infinities are strings
COMMIT = {
    "id": str,
    "content": str,
    "entry": int,
    "session": str,
    "run": str,
    "step": int,
    "message": str,
    "time": str,
    "time_ns": int,
    "parents": [str],
    "metrics": {str: NUMBER},
    "tags": [str],
    "logical_bytes": int,
    "new_bytes": int,
    "leaves": int,
    "forgotten": bool,
    "thinned": [str],
    "cast": {str: str},
}
LINKED = {**COMMIT, "links": {str: str}}
LEAF = {
    "path": str,
    "kind": str,
    "dtype": str,
    "shape": [int],
    "nbytes": (int, None),
    "alias_of": (str, None),
    "gone": bool,
}
SIDE = ({"type": str, "value": (str, None)}, None)
DOCUMENTS: dict[str, dict[str, Any]] = {
    "log": {"store": str, "total": int, "commits": [LINKED]},
    "show best --usage": {
        "store": str,
        "commit": {
            **LINKED,
            "children": [str],
            "exclusive_bytes": int,
            "shared_bytes": int,
            "thinned_from": (str, None),
            "cast_errors": [dict],
        },
        "trees": [
            {
                "keys": [str],
                "schema": str,
                "leaves": int,
                "tensor_bytes": int,
                "dtypes": {str: int},
                "pickles": [str],
            }
        ],
        "packs": [
            {
                "number": int,
                "id": str,
                "bytes": int,
                "chunks": int,
                "metadata": bool,
                "condemned": bool,
            }
        ],
        "problem": None,
        "layout": None,
    },
    "ls": {"store": str, "commit": str, "leaves": [LEAF]},
    "ls -l": {
        "store": str,
        "commit": str,
        "leaves": [{**LEAF, "chunks": int, "value": (str, None)}],
    },
    "diff 100 200": {
        "thinned": [str],
        "store": str,
        "before": COMMIT,
        "after": COMMIT,
        "unchanged": int,
        "changed_bytes": int,
        "changes": [
            {
                "path": str,
                "change": str,
                "before": SIDE,
                "after": SIDE,
                "raw_bytes": int,
                "changed_bytes": int,
            }
        ],
    },
    "tag": {"store": str, "tags": [{"name": str, "commit": str, "run": str, "step": int}]},
    "stats": {
        "store": str,
        "store_id": str,
        "chunk_bytes": int,
        "codec": str,
        "commits": int,
        "forgotten": int,
        "tags": int,
        "logical_bytes": int,
        "stored_bytes": int,
        "unreferenced_bytes": int,
        "dedup_ratio": float,
        "packs": int,
        "chunks": int,
        "runs": [
            {
                "run": str,
                "commits": int,
                "latest": str,
                "step": int,
                "time": str,
                "time_ns": int,
            }
        ],
        "usage": [{"commit": str, "logical_bytes": int, "new_bytes": int, "exclusive_bytes": int}],
    },
    "migrate": {
        "store": str,
        "catalog": str,
        "before": str,
        "after": str,
        "wanted": str,
        "entry": int,
        "commits": int,
    },
}


def check_shape(found: object, wanted: Any, where: str) -> None:
    """`wanted` is a type, None, a tuple of alternatives, a list of one item for any number, or a
    dict by key (or by `str` for any key)."""
    if isinstance(wanted, tuple):
        alternative = next(
            (w for w in wanted if isinstance(found, type(w) if not isinstance(w, type) else w)),
            wanted[0],
        )
        check_shape(found, alternative, where)
    elif isinstance(wanted, list):
        assert isinstance(found, list), where
        for i, item in enumerate(found):
            check_shape(item, wanted[0], f"{where}[{i}]")
    elif isinstance(wanted, dict):
        assert isinstance(found, Mapping), where
        if str not in wanted:
            assert set(found) == set(wanted), where
        for key, item in found.items():
            check_shape(item, wanted.get(key, wanted.get(str)), f"{where}.{key}")
    else:
        assert found is None if wanted is None else type(found) is wanted, f"{where} is {found!r}"


@pytest.mark.parametrize("words", DOCUMENTS)
def test_json_is_one_document_of_a_documented_shape(made_store: Path, words: str) -> None:
    result = run(*words.split(), "--json", "-s", str(made_store))
    assert (result.code, result.err) == (0, "")
    check_shape(result.document, DOCUMENTS[words], words)


def test_every_name_in_a_json_document_is_explained() -> None:
    def names(shape: object) -> set[str]:
        if isinstance(shape, dict):
            return {key for key in shape if isinstance(key, str)}.union(*map(names, shape.values()))
        return set().union(*map(names, shape)) if isinstance(shape, list | tuple) else set()

    text = DOCS.read_text(encoding="utf-8")
    assert [
        name
        for shape in DOCUMENTS.values()
        for name in sorted(names(shape))
        if f"`{name}`" not in text
    ] == []


def log(store: Path, *words: str) -> list[dict[str, Any]]:
    commits = call("log", *words, "--json", "-s", str(store)).document["commits"]
    assert isinstance(commits, list)
    return commits


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("", [220, 210, 300, 200, 100]),
        ("--all", [220, 210, 300, 200, 100]),
        ("-n 2", [220, 210]),
        ("-n 0", []),
        ("--run main", [300, 200, 100]),
        ("--run tune -n 1", [220]),
        ("--tag", [210, 300]),
        ("--tag tune/*", [210]),
        ("--tag nothing*", []),
        ("--since 1h", [220, 210, 300, 200, 100]),
        ("--until 1h", []),
        ("--since 2020-01-01 --until 2020-12-31", []),
        ("--sort loss", [300, 200, 100, 220, 210]),
        ("--sort loss:max --run main", [100, 200, 300]),
        ("--sort val_loss -n 3", [200, 100, 220]),
        ("--sort accuracy:max -n 1", [300]),
    ],
)
def test_log_filters_and_sorts(made_store: Path, words: str, steps: list[int]) -> None:
    assert [commit["step"] for commit in log(made_store, *words.split())] == steps


def test_json_has_numbers_that_json_lacks_as_strings(made_store: Path) -> None:
    commits = {commit["step"]: commit["metrics"] for commit in log(made_store)}
    assert commits[300]["val_loss"] == "NaN"
    assert commits[210]["loss"] == "Infinity"
    assert commits[200] == {"loss": 0.5, "accuracy": 0.2, "val_loss": 1.0}


def test_log_in_a_pipe_is_one_plain_line_per_commit(made_store: Path) -> None:
    lines = run("log", "-s", str(made_store)).out.splitlines()
    assert lines[0].split() == [
        "COMMIT",
        "STEP",
        "RUN",
        "TAGS",
        "TIME",
        "LOGICAL",
        "NEW",
        "LOSS",
        "VAL_LOSS",
        "ACCURACY",
        "MESSAGE",
    ]
    assert len(lines) == 6
    assert len({len(line.split("Z  ")[0]) for line in lines[1:]}) == 1, "columns are aligned"
    assert "first line\\x1b]0;title\\x07 …" in lines[4]
    assert not any(c in line for line in lines for c in "\x1b●│")


def test_log_shows_the_metrics_that_were_asked_for(made_store: Path) -> None:
    header = (
        call("log", "--run", "main", "--metric", "val_loss", "-s", str(made_store))
        .out.splitlines()[0]
        .split()
    )
    assert header == ["COMMIT", "STEP", "TAGS", "TIME", "LOGICAL", "NEW", "VAL_LOSS", "MESSAGE"]


def test_log_draws_the_lineage_in_a_pipe_if_it_is_asked_to(made_store: Path) -> None:
    lines = call("log", "--graph", "-s", str(made_store)).out.splitlines()
    assert all("●" in line or "○" in line for line in lines[1:])


def test_show_names_the_four_kinds_of_bytes(made_store: Path) -> None:
    result = call("show", "200", "--usage", "-s", str(made_store))
    assert result.code == 0
    for name, meaning in {
        "logical": "the size of the state",
        "new": "what the store grew by",
        "exclusive": "would be freed if this commit alone went",
        "shared": "in common with other commits",
    }.items():
        assert any(
            line.split()[:1] == [name] and meaning in line for line in result.out.splitlines()
        ), name
    assert "second line" in result.out
    assert "parents    " in result.out
    assert "(step 100)" in result.out
    assert "(step 300)" in result.out


def test_show_knows_what_a_commit_has_alone_and_what_it_shares(made_store: Path) -> None:
    commit = call("show", "210", "--usage", "--json", "-s", str(made_store)).document["commit"]
    assert commit["exclusive_bytes"] >= 210 * 8 * 4
    assert commit["shared_bytes"] >= 300_000 * 4


def test_show_leaves_out_what_takes_a_look_at_every_commit(made_store: Path) -> None:
    commit = call("show", "--json", "-s", str(made_store)).document["commit"]
    assert (commit["exclusive_bytes"], commit["shared_bytes"]) == (None, None)
    assert "exclusive" not in call("show", "-s", str(made_store)).out


def test_ls_in_a_pipe_is_one_line_per_leaf(made_store: Path) -> None:
    lines = call("ls", "best", "-s", str(made_store)).out.splitlines()
    assert len(lines) == 1 + LEAVES - 52 + 52 + 4
    assert any(
        line.split() == ["model/embedding", "float32", "[300000]", "1.1", "MiB", "-"]
        for line in lines
    )
    assert any(
        line.split() == ["model/head", "float32", "[300000]", "0", "B", "model/embedding"]
        for line in lines
    )


@pytest.mark.parametrize(
    ("globs", "count"),
    [
        (["model"], 52),
        (["model/layers.3*"], 11),
        (["layers.3*"], 11),
        (["model/head"], 1),
        (["progress/", "*.49.weight"], 5),
        (["counters/*", "model"], LEAVES),
    ],
)
def test_ls_takes_globs_and_what_lies_below(made_store: Path, globs: list[str], count: int) -> None:
    assert (
        len(call("ls", "latest", *globs, "--json", "-s", str(made_store)).document["leaves"])
        == count
    )


def test_ls_long_shows_values_chunks_and_exact_sizes(made_store: Path) -> None:
    leaves = {
        leaf["path"]: leaf
        for leaf in call("ls", "200", "-l", "--json", "-s", str(made_store)).document["leaves"]
    }
    assert leaves["progress/lr"]["value"] == "0.00025"
    assert leaves["progress/seed"]["value"] == str(2**60)
    assert leaves["progress/text"]["value"] == "'a\\x1b[31mb'"
    assert leaves["model/embedding"]["chunks"] == 2
    assert leaves["model/embedding"]["nbytes"] == 1_200_000
    assert leaves["model/head"]["alias_of"] == "model/embedding"


def test_ls_folds_numbers_into_patterns_that_it_takes_as_globs(made_store: Path) -> None:
    folded = [line.split() for line in call("ls", "--fold", "-s", str(made_store)).out.splitlines()]
    assert ["50", "model/layers.*.weight", "float32", "[4,", "64]", "50.0", "KiB", "-"] in folded
    listed = call("ls", "latest", "model/layers.*.weight", "-s", str(made_store)).out
    assert len(listed.splitlines()) == 51


def test_diff_says_which_leaves_changed_and_how(made_store: Path) -> None:
    result = call("diff", "main@100", "tune@210", "-s", str(made_store))
    assert result.code == 0
    lines = {line.split()[1]: line for line in result.out.splitlines() if line[0] in "+-~"}
    assert lines["lora/a"].split()[:4] == ["+", "lora/a", "float32[210,", "8]"]
    assert "0.0005 → 0.00025" in lines["progress/lr"]
    assert "1 → 2" in lines["progress/epoch"]
    assert "1.0 MiB  1.1 MiB" in lines["model/embedding"], "one of two chunks"
    back = call("diff", "tune@210", "main@100", "--json", "-s", str(made_store)).document
    assert {change["path"]: change["change"] for change in back["changes"]}["lora/a"] == "removed"


def test_diff_stat_sums_up_by_key(made_store: Path) -> None:
    lines = call("diff", "100", "210", "--stat", "-s", str(made_store)).out.splitlines()
    assert lines[0].split()[:5] == ["KEY", "ADDED", "REMOVED", "CHANGED", "UNCHANGED"]
    rows = {line.split()[0]: line.split()[1:5] for line in lines[1:-1]}
    assert rows["lora"] == ["1", "0", "0", "0"]
    assert rows["progress"] == ["0", "0", "2", "2"]


def test_a_diff_of_many_leaves_is_summed_up_by_key(tmp_path: Path) -> None:
    place = ("-s", str(tmp_path / "store"))
    with ckptstore.open(place[1]) as store:
        for step in (1, 2):
            model = {f"{chr(97 + i % 26)}{chr(97 + i // 26)}": i + step for i in range(60)}
            state = {"model": {name: torch.tensor([float(x)]) for name, x in model.items()}}
            store.commit(state | {"progress": {"lr": 0.5**step}}, step=step)
    result = call("diff", "1", "2", *place)
    assert result.code == 0
    key, model, progress, *rest = [line.split() for line in result.out.splitlines()]
    assert key[:2] == ["KEY", "ADDED"]
    assert (model[:4], progress[:4]) == (["model", "0", "0", "60"], ["progress", "0", "0", "1"])
    assert rest[1][:6] == ["~", "1", "progress/lr", "0.5", "→", "0.25"]
    assert "--all one by one" in result.out
    assert "model/aa" in call("diff", "1", "2", "--fold", *place).out
    assert len(call("diff", "1", "2", "--all", *place).out.splitlines()) == 63
    assert len(call("diff", "1", "2", "--json", *place).document["changes"]) == 61


@pytest.mark.parametrize(
    "words", ["show 300", "ls 300", "diff 300 300~1", "export 300 OUT", "tag t 300"]
)
def test_a_step_of_several_runs_is_not_taken_in_silence(tmp_path: Path, words: str) -> None:
    place = tmp_path / "store"
    for name, steps in (("main", (200, 300)), ("tune", (300, 400))):
        with ckptstore.open(place, run=name) as store:
            for step in steps:
                store.commit({"model": {"w": torch.tensor([1.0])}}, step=step)
    out = str(tmp_path / "out.safetensors")
    command = [word.replace("OUT", out) for word in words.split()]
    result = call(*command, "-s", str(place))
    said = "step 300 is in 2 runs (main, tune); the newest is taken, tune@300: --run or RUN@300"
    assert (result.code, said in result.err) == (0 if "~" not in words else 1, True), result.err
    for chosen in (
        ["--run", "main", *command],
        [word.replace("300", "main@300") for word in command],
    ):
        Path(out).unlink(missing_ok=True)
        assert "is in 2 runs" not in call(*chosen, "-s", str(place)).err
    assert call("show", "200", "-s", str(place)).err == ""


def test_diff_of_equal_states_says_so(made_store: Path) -> None:
    result = call("diff", "best", "best", "-s", str(made_store))
    assert (result.code, result.out) == (0, f"no difference: {LEAVES + 4} leaves are the same\n")


def test_stats_add_up(made_store: Path) -> None:
    stats = call("stats", "--json", "-s", str(made_store)).document
    assert stats["commits"] == len(stats["usage"]) == 5
    assert stats["logical_bytes"] == sum(commit["logical_bytes"] for commit in stats["usage"])
    assert {run["run"]: run["commits"] for run in stats["runs"]} == {"main": 3, "tune": 2}
    assert stats["dedup_ratio"] == pytest.approx(stats["logical_bytes"] / stats["stored_bytes"])
    assert "dedup" in call("stats", "-n", "1", "-s", str(made_store)).out


def test_tags_are_listed_by_name(made_store: Path) -> None:
    assert call("tag", "--names", "-s", str(made_store)).out.split() == [
        "best",
        "prod",
        "tune/first",
    ]
    assert [line.split()[0] for line in call("tag", "-s", str(made_store)).out.splitlines()] == [
        "TAG",
        "best",
        "prod",
        "tune/first",
    ]
