"""What a release says of itself is true: versions, bounds, workflows."""

import re
import tomllib
from pathlib import Path

import pytest

import ckptstore
from tests import versions

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TRAINERS = (
    "accelerate",
    "deepspeed",
    "lightning",
    "mlflow",
    "ray",
    "torchtitan",
    "trackio",
    "transformers",
    "wandb",
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_citation_has_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.M) == [ckptstore.__version__]


def test_every_requirement_has_a_lowest_version_that_the_oldest_run_takes() -> None:
    wanted = versions.requirements(oldest=False)
    assert all(re.fullmatch(r"[\w\[\]-]+>=[\d.]+", text) for text in wanted)
    assert versions.requirements(oldest=True) == [text.replace(">=", "==") for text in wanted]
    assert {"torch", "s3fs", "obstore"} <= {text.partition(">")[0] for text in wanted}


def test_the_core_of_the_suite_and_its_tools_exist() -> None:
    assert [path for path in versions.CORE if not (ROOT / path).exists()] == []
    pinned = {line.partition("==")[0] for line in versions.lines("constraints.txt")}
    assert {tool.partition("[")[0] for tool in versions.TOOLS} <= pinned


def test_the_extras_of_trainers_begin_with_the_releases_that_the_oldest_run_takes() -> None:
    extras = PROJECT["optional-dependencies"]
    pinned = dict(line.split("==") for line in versions.lines("constraints-trainers-oldest.txt"))
    texts = [text for extra in (*TRAINERS, "trainers") for text in extras[extra]]
    bounds = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", text) for text in texts]
    lowest = {bound[1]: bound[2] for bound in bounds if bound}
    assert lowest.keys() - pinned.keys() == {"omegaconf", "pandas", "torchtitan"}
    wrong = [name for name in lowest.keys() & pinned.keys() if pinned[name] != f"{lowest[name]}.0"]
    assert wrong == []
    newest = dict(line.split("==") for line in versions.lines("constraints.txt"))
    assert newest["torchtitan"] == f"{lowest['torchtitan']}.0", "there is no older one to test"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_the_makefile(workflow: Path) -> None:
    called = re.findall(r"(?:run: make|target:) ([\w-]+)", workflow.read_text(encoding="utf-8"))
    assert called
    assert all(re.search(rf"^{target}:", MAKEFILE, re.M) for target in called)


def test_the_workflows_test_the_python_versions_that_are_declared() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    tested = re.findall(r'"(3\.\d+)"', text)
    declared = re.findall(r":: (3\.\d+)'", str(PROJECT["classifiers"]))
    assert tested == declared
    assert f"{declared[0]} to {declared[-1]}" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert PROJECT["requires-python"] == f">={declared[0]}"
