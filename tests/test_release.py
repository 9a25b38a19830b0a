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


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_the_makefile(workflow: Path) -> None:
    called = re.findall(r"run: make ([\w-]+)", workflow.read_text(encoding="utf-8"))
    assert called
    assert all(re.search(rf"^{target}:", MAKEFILE, re.M) for target in called)


def test_the_workflows_test_the_python_versions_that_are_declared() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    tested = re.findall(r'"(3\.\d+)"', text)
    declared = re.findall(r":: (3\.\d+)'", str(PROJECT["classifiers"]))
    assert tested == declared
    assert f"{declared[0]} to {declared[-1]}" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert PROJECT["requires-python"] == f">={declared[0]}"
