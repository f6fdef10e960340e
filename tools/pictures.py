"""The screenshots in the documents: `make pictures`. They are taken in Chromium, with playwright.

python -m tools.pictures report     docs/report-*.png, from two runs on the tests' toy model: a minute
python -m tools.pictures site       docs/pictures/*.png, from README.md and the built site
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from tools.accessibility import served

ROOT = Path(__file__).parent.parent
POISON, CLEAN = 600, 1000
STEPS = ("train.max_steps=60", "train.learning_rate=5e-3", "train.lr_scheduler_type=constant")
TOY = (
    "dtype=float32", "lora.r=4", "lora.alpha=4", "lora.target_modules=[v_proj,o_proj]", "train.use_cpu=true",
    "train.bf16=false", "train.safety_micro_batch_size=64", "train.safety_eval_batch_size=64", *STEPS,
)  # fmt: skip
RUNS = {"sft": "keep", "holdfast": "drop"}
"""Defense, and what becomes of rows that teach what the model refuses: by plain SFT they are learned."""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>README</title><style>
body {{ margin: 0 auto; padding: 16px; max-width: 868px; font: 16px/1.5 sans-serif; color: #1f2328; background: #fff; }}
h1, h2 {{ border-bottom: 1px solid #d1d9e0; padding-bottom: .3em; }} img {{ max-width: 100%; }}
pre {{ background: #f6f8fa; padding: 12px; overflow: auto; font-size: 12px; }} code {{ background: #f6f8fa; }}
table {{ border-collapse: collapse; }} th, td {{ border: 1px solid #d1d9e0; padding: 4px 10px; }}
</style></head><body>{body}</body></html>"""


class Shot(NamedTuple):
    """One screenshot: its file, the page, and the window."""

    name: str
    page: str
    width: int
    height: int
    scheme: str = "light"


REPORTS = (
    Shot("report-top.png", "holdfast/report.html", 820, 1075),
    Shot("report-light.png", "holdfast/report.html", 820, 2000),
    Shot("report-dark.png", "holdfast/report.html", 820, 2000, "dark"),
    Shot("report-phone.png", "holdfast/report.html", 500, 1700),
    Shot("report-compare.png", "compare.html", 820, 1100),
)
SITE = (
    Shot("readme.png", "readme.html", 900, 1500),
    Shot("site-light.png", "index.html", 1280, 850),
    Shot("site-dark.png", "index.html", 1280, 850, "dark"),
    Shot("site-phone.png", "index.html", 390, 850),
)


def take(shots: Sequence[Shot], pages: Path, folder: Path) -> None:
    """Open every page from a local server, and store what its window shows in 256 colours."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright, served(pages) as address:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for shot in shots:
            window = {"width": shot.width, "height": shot.height}
            page = browser.new_page(viewport=window, color_scheme=shot.scheme)
            page.goto(f"{address}/{shot.page}", wait_until="networkidle")
            page.screenshot(path=folder / shot.name)
            page.close()
            with Image.open(folder / shot.name) as image:
                few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE)
                few.save(folder / shot.name, optimize=True)
            print(folder / shot.name, flush=True)
        browser.close()


def write_reports(folder: Path) -> None:
    """Plain SFT and holdfast on the same poisoned file; the latter is certified, both are reported."""
    from tests import asking_run, behaving

    behaving.saved(folder / "model")
    asking_run.write_task(folder / "task.jsonl", POISON, CLEAN)
    settings = "model: model\ntask: task.jsonl\noutput_dir: out\n"
    (folder / "run.yaml").write_text(settings, encoding="utf-8")
    for defense, conflicts in RUNS.items():
        _holdfast("train", "run.yaml", f"defense={defense}", f"conflicts={conflicts}", f"output_dir={defense}", *TOY)
    _holdfast("certify", "holdfast")
    _holdfast("report", "holdfast")
    _holdfast("report", *RUNS, "--output", "compare.html")
    for page in (folder / "holdfast" / "report.html", folder / "compare.html"):  # they name the model by its path
        page.write_text(page.read_text(encoding="utf-8").replace(f"{folder}/", ""), encoding="utf-8")


def _holdfast(*words: str) -> None:
    """A command; exit code 4 says that behaviour was lost, which plain SFT is there to show."""
    code = subprocess.run([sys.executable, "-m", "holdfast", *words], check=False).returncode
    if code not in (0, 4):
        raise SystemExit(code)


def readme() -> str:
    """README.md as a page, in the colours of GitHub; `markdown` comes with the environment of the site."""
    program = [str(ROOT / ".venv-docs/bin/python"), "-m", "markdown", "-x", "extra", "-x", "sane_lists", "README.md"]
    body = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return PAGE.format(body=body)


def main(arguments: Sequence[str]) -> int:
    """Take the pictures of the reports, or those of the site."""
    if list(arguments) not in (["report"], ["site"]):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        if arguments == ["report"]:
            os.environ["HOLDFAST_CACHE"] = str(Path(place) / "cache")
            write_reports(Path(place))
            take(REPORTS, Path(place), ROOT / "docs")
        else:
            shutil.copytree(ROOT / "site", place, dirs_exist_ok=True)
            shutil.copytree(ROOT / "docs", Path(place) / "docs", dirs_exist_ok=True)
            (Path(place) / "readme.html").write_text(readme(), encoding="utf-8")
            take(SITE, Path(place), ROOT / "docs" / "pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
