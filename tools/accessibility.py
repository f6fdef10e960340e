"""Looks for accessibility faults in built pages, with axe in a real Chromium: `make accessibility`.

    python -m tools.accessibility AXE.js PAGE.html ...

Each page is opened in light at 1,280 pixels and in dark at 390, with everything unfolded. A serious or critical fault,
or a page that is wider than its window, ends with exit code 1; the kinds of lesser faults are counted. AXE.js is
`axe.min.js` of the npm package axe-core.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

GRAVE = ("serious", "critical")
WINDOWS = (("light", 1280), ("dark", 390))
RUN = "axe.run(document, {resultTypes: ['violations']})"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def faults(browser: Any, page: Path, axe: str, scheme: str, width: int) -> Iterator[tuple[str, str]]:
    """Faults of one page in one window: impact and kind, and a place."""
    # The report's policy allows no script: axe is put in from outside.
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    try:
        opened = context.new_page()
        opened.goto(page.resolve().as_uri())
        opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        opened.evaluate(axe)
        for found in opened.evaluate(RUN)["violations"]:
            where = f"{len(found['nodes'])} places, the first {found['nodes'][0]['html'][:100]}"
            yield f"{found['impact']} {found['id']}", where
        if (over := opened.evaluate(OVERFLOW)) > 0:
            yield "serious overflow", f"{over} pixels wider than its window"
    finally:
        context.close()


def main(arguments: Sequence[str]) -> int:
    """Check every page in every window; returns the exit code."""
    from playwright.sync_api import sync_playwright

    axe, pages = Path(arguments[0]).read_text(encoding="utf-8"), [Path(name) for name in arguments[1:]]
    grave, lesser = 0, Counter[str]()
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for page in pages:
            for scheme, width in WINDOWS:
                for kind, where in faults(browser, page, axe, scheme, width):
                    if kind.startswith(GRAVE):
                        grave += 1
                        print(f"{page} ({scheme}, {width}): {kind}: {where}", flush=True)
                    else:
                        lesser[kind] += 1
        browser.close()
    print(f"{len(pages)} pages in {len(WINDOWS)} windows: {grave} serious faults; lesser: {dict(lesser)}")
    return 1 if grave else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
