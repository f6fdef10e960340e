"""Looks for accessibility faults in built pages, with axe in a real Chromium: `make accessibility`.

    python -m tools.accessibility AXE.js FOLDER ...

Every HTML page under each folder is opened from a local server, in light and in dark, at 1,280 and at 390 pixels, with
everything unfolded. A serious or critical fault, a page that is wider than its window, or a file that a page does not
find ends with exit code 1; the kinds of lesser faults are counted. AXE.js is `axe.min.js` of the npm package axe-core.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GRAVE = ("serious", "critical")
WINDOWS = tuple(itertools.product(("light", "dark"), (1280, 390)))
RUN = "axe.run(document, {resultTypes: ['violations']})"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
UNFOLD = "document.querySelectorAll('details').forEach(one => { one.open = true; })"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing of requests."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a local server of `folder`: 404.html names its files from the root of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def faults(browser: Any, address: str, axe: str, scheme: str, width: int) -> Iterator[tuple[str, str]]:
    """Faults of one page in one window: impact and kind, and a place."""
    # The report's policy allows no script: axe is put in from outside.
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    try:
        opened, missing = context.new_page(), []
        opened.on("response", lambda answer: missing.append(answer.url) if answer.status >= 400 else None)
        opened.goto(address)
        opened.evaluate(UNFOLD)
        opened.evaluate(axe)
        for found in opened.evaluate(RUN)["violations"]:
            where = f"{len(found['nodes'])} places, the first {found['nodes'][0]['html'][:100]}"
            yield f"{found['impact']} {found['id']}", where
        if (over := opened.evaluate(OVERFLOW)) > 0:
            yield "serious overflow", f"{over} pixels wider than its window"
        if missing:
            yield "serious missing", f"{len(missing)} files, the first {missing[0]}"
    finally:
        context.close()


def main(arguments: Sequence[str]) -> int:
    """Check every page in every window; returns the exit code."""
    from playwright.sync_api import sync_playwright

    axe, folders = Path(arguments[0]).read_text(encoding="utf-8"), [Path(name) for name in arguments[1:]]
    pages, grave, lesser = 0, 0, Counter[str]()
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for folder in folders:
            with served(folder) as address:
                for page in sorted(folder.rglob("*.html")):
                    pages += 1
                    name = page.relative_to(folder).as_posix()
                    for scheme, width in WINDOWS:
                        for kind, where in faults(browser, f"{address}/{name}", axe, scheme, width):
                            if kind.startswith(GRAVE):
                                grave += 1
                                print(f"{page} ({scheme}, {width}): {kind}: {where}", flush=True)
                            else:
                                lesser[kind] += 1
        browser.close()
    print(f"{pages} pages in {len(WINDOWS)} windows: {grave} serious faults; lesser: {dict(lesser)}")
    return 1 if grave or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
