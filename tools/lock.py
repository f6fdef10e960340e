"""Write the lock files under `requirements/`: every package by version and sha256, as `make` installs them.

    python tools/lock.py                          keep the versions, follow pyproject.toml
    python tools/lock.py --upgrade                newest versions
    python tools/lock.py --cpu-wheels FOLDER      also allow the CPU builds of torch in that folder

It needs `uv` on the path and the package index. `uv pip compile --universal` resolves for all platforms at once and
lists the sha256 of every file that the index has of a version.

| file          | holds                                                                                    |
|---------------|------------------------------------------------------------------------------------------|
| cuda.lock     | run time, `test` extra, embedded model; torch as the index has it, with CUDA on Linux    |
| cpu.lock      | the same without CUDA's libraries; of torch the CPU builds: macOS, Windows, and the Linux |
|               | wheels that were given with --cpu-wheels, now or earlier                                 |
| build.lock    | the build backend                                                                        |
| sbom.lock     | what `make sbom` needs                                                                   |
| coverage.lock | what `make coverage` adds to the environment                                             |
| docs.lock     | what `make docs` builds the site with                                                    |
| package.lock  | what `make package` builds wheel and sdist with                                          |
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
PYTHON = "3.11"  # the oldest that is supported; markers cover the others
CUDA_ONLY = ("cuda-", "nvidia-", "triton")
SBOM = ["cyclonedx-bom>=7"]
COVERAGE = ["coverage>=7.10"]  # the first that measures subprocesses by a setting
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=1", "pymdown-extensions<13"]
"""pymdown-extensions 13 needs Python 3.11.5: a lock has one version of each package."""
PACKAGE = ["build>=1.2"]
EDITABLE = "editables"  # hatchling asks for it when a project is installed in place

Entries = dict[str, tuple[str, list[str]]]
"""Package -> requirement with its marker, sha256 of every allowed file."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true")
    parser.add_argument("--cpu-wheels", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["test"]
    embedded = project["project"]["optional-dependencies"]["embedded"]
    earlier = read(LOCKS / "cpu.lock")
    keep = None if asked.upgrade else LOCKS / "cuda.lock"

    cuda = compiled(wanted, keep) | compiled(embedded, keep, "--no-deps")
    cpu = {name: entry for name, entry in cuda.items() if not name.startswith(CUDA_ONLY)}
    cpu["torch"] = cpu_torch(cuda["torch"], earlier.get("torch"), asked.cpu_wheels)
    write(
        "cuda",
        cuda,
        "Linux with or without a GPU: torch brings CUDA's libraries. Versions and hashes are the index's own.",
    )
    write("cpu", cpu, "Linux with a CPU build of torch at hand (pip's find-links or index), macOS, Windows.")
    backend = [*project["build-system"]["requires"], EDITABLE]
    write(
        "build", compiled(backend, None if asked.upgrade else LOCKS / "build.lock"), "What builds the project itself."
    )
    write("sbom", compiled(SBOM, None if asked.upgrade else LOCKS / "sbom.lock"), "What `make sbom` installs.")
    for name, wanted, what in (
        ("coverage", COVERAGE, "What `make coverage` adds to the environment."),
        ("docs", DOCS, "What `make docs` builds the site with."),
        ("package", PACKAGE, "What `make package` builds wheel and sdist with."),
    ):
        write(name, compiled(wanted, None if asked.upgrade else LOCKS / f"{name}.lock"), what)
    return 0


def compiled(wanted: list[str], keep: Path | None, *options: str) -> Entries:
    """The resolution of `wanted`; versions in the lock `keep` are preferred."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "wanted.in", Path(folder) / "wanted.lock"
        source.write_text("\n".join(wanted), encoding="utf-8")
        if keep is not None and keep.exists():
            output.write_text(keep.read_text(encoding="utf-8"), encoding="utf-8")
        command = ["uv", "pip", "compile", str(source), "--universal", "--generate-hashes", "--python-version", PYTHON]
        command += ["--no-header", "--no-annotate", "--quiet", *options, "--output-file", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return read(output)


def read(path: Path) -> Entries:
    """The requirements of a lock file."""
    found: Entries = {}
    if path.exists():
        joined = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in joined.splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                required = line.split(" --hash=")[0].strip()
                name = re.sub(r"[-_.]+", "-", required.split("==")[0]).lower()
                found[name] = (required, re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return found


def cpu_torch(
    entry: tuple[str, list[str]], earlier: tuple[str, list[str]] | None, wheels: Path | None
) -> tuple[str, list[str]]:
    """The CPU builds of this version of torch.

    On the index the files for Linux need CUDA's libraries; those for macOS and Windows do not.
    """
    required, listed = entry
    version = required.split("==")[1].split()[0]
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    with urllib.request.urlopen(f"{index}/torch/", timeout=60) as answer:
        page = answer.read().decode()
    linux = set(re.findall(rf"/torch-{re.escape(version)}-[^\"#]*linux[^\"#]*#sha256=([0-9a-f]{{64}})", page))
    if not linux & set(listed):
        raise SystemExit(f"the page of torch at {index} names no Linux file of {version}: its form has changed")
    found = set(listed) - linux
    if earlier is not None and earlier[0] == required:
        found |= set(earlier[1]) - linux
    for wheel in sorted(wheels.glob(f"torch-{version}+cpu-*.whl")) if wheels is not None else ():
        with wheel.open("rb") as handle:
            found.add(hashlib.file_digest(handle, "sha256").hexdigest())
    return required, sorted(found)


def write(name: str, entries: Entries, what: str) -> None:
    """One lock file."""
    lines = ["# Written by `python tools/lock.py`; do not edit.", f"# {what}", "# Install: see Makefile."]
    for _, (required, hashes) in sorted(entries.items()):
        lines.append(" \\\n".join([required, *(f"    --hash=sha256:{one}" for one in sorted(hashes))]))
    LOCKS.mkdir(exist_ok=True)
    (LOCKS / f"{name}.lock").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}.lock: {len(entries)} packages")


if __name__ == "__main__":
    sys.exit(main())
