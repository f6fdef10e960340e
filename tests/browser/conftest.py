"""A real, headless Chromium; without one these tests are skipped and say so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def chromium():
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium on this machine: install Debian's chromium to open the report in a real browser")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


class Opened:
    """A page and everything it said or asked for."""

    def __init__(self, page) -> None:
        self.page = page
        self.messages: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture(scope="module")
def resized(chromium):
    """A file that is opened once and shown at another width: `resized(path, 360)`."""
    context, pages = chromium.new_context(color_scheme="light"), {}

    def call(path: Path, width: int):
        if path not in pages:
            pages[path] = context.new_page()
            pages[path].goto(path.as_uri())
        pages[path].set_viewport_size({"width": width, "height": 800})
        return pages[path]

    yield call
    context.close()


@pytest.fixture
def open_page(chromium):
    """Open a file: `open_page(path, width=360, scheme="dark")`."""
    contexts = []

    def call(path: Path, *, width: int = 900, scheme: str = "light") -> Opened:
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.goto(path.as_uri())
        return opened

    yield call
    for context in contexts:
        context.close()
