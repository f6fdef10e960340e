"""What a release says of itself agrees: version, changelog, citation, workflows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import holdfast
from holdfast.core.provenance import versions
from holdfast.core.version import VERSION

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_version_changelog_and_citation_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None
    assert (newest[1], newest[2]) == (VERSION, str(citation["date-released"]))
    assert str(citation["version"]) == VERSION == holdfast.__version__ == versions()["holdfast"]


def test_the_build_reads_the_version_from_its_one_line():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setting = project["tool"]["hatch"]["version"]
    assert re.findall(setting["pattern"], (ROOT / setting["path"]).read_text(encoding="utf-8")) == [VERSION]
    assert "version" in project["project"]["dynamic"]


def test_no_remedy_names_the_other_project_of_the_index():
    """`pip install holdfast` would install somebody else's package."""
    found = [
        (str(path.relative_to(ROOT)), line.strip())
        for folder in ("src", "docs", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".j2") and path.name != "log.md"
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install '?holdfast(?!-llm)\b", line)
    ]
    assert found == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_and_calls_what_exists(path):
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)( # v[\d.]+)?", text)
    assert used
    assert [name for name, tag in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name) or not tag] == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    called = {word for line in re.findall(r"run: make (.*)", text) for word in line.split() if "=" not in word}
    assert called <= targets
    for script in re.findall(r"\b((?:tools|tests)/[\w/]+(?:\.py)?)", text):
        assert (ROOT / script).exists(), script
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_nothing_is_published_before_the_other_stacks_are_tried():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(jobs["publish"]["needs"]) == {"build", "stacks"}
    called = {step["run"].split()[1] for step in jobs["stacks"]["steps"] if step.get("run", "").startswith("make ")}
    own = re.findall(r"^(test-\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert called == set(own)
