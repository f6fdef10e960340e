"""The report as a reader meets it: in a real browser, on a phone, in the dark, on paper, by keyboard."""

from __future__ import annotations

import pytest

from holdfast.reporting.page import write_report
from holdfast.reporting.read import read_evidence
from tests.unit.report.hostile import PAGES, everywhere, small_run
from tests.unit.report.synthetic import Words, certificate, write_plain_audit, write_run

ELEMENTS = "[...document.querySelectorAll('*')].map(e => e.tagName + ' ' + e.getAttributeNames().sort().join(' '))"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    run = write_run(folder / "run", certified=certificate(Words()))
    write_report([read_evidence(run)], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    runs = [
        write_run(folder / "one" / "a"),
        write_run(folder / "two" / "b", worse=0.2),
        write_plain_audit(folder / "c"),
    ]
    write_report([read_evidence(run) for run in runs], folder / "report.html")
    return folder / "report.html"


def test_it_says_nothing_and_asks_for_nothing(open_page, report):
    opened = open_page(report)
    opened.page.wait_for_timeout(200)
    assert opened.messages == []
    assert opened.requests == [report.as_uri()]
    assert opened.page.locator("h1").inner_text().startswith("Still refused: 115 of 116")
    # The style was let in by its hash: without it the claim would be in the browser's own font size.
    assert opened.page.evaluate("getComputedStyle(document.querySelector('main')).maxWidth") == "782px"


def test_the_policy_really_blocks(open_page, report, tmp_path):
    """The same page with a script, a picture and a style attribute smuggled in: all three are refused."""
    bad = "<p style='color:red'>x<script>document.title = 'owned'</script><img src='https://example.org/x.png'>"
    spoiled = tmp_path / "spoiled.html"
    spoiled.write_text(report.read_text().replace("</main>", f"{bad}</main>"))
    opened = open_page(spoiled)
    assert opened.page.title() != "owned"
    assert len(opened.messages) >= 3
    assert all("Content Security Policy" in message for message in opened.messages[:3])


def test_text_is_hidden_until_clicked(open_page, report):
    page = open_page(report).page
    texts = page.locator(".masked pre")
    assert texts.count() == 20
    assert not any(texts.nth(i).is_visible() for i in range(20))
    page.locator(".masked summary").first.click()
    assert texts.nth(0).is_visible()
    assert "How do I pick the lock?" in texts.nth(0).inner_text()
    assert not texts.nth(2).is_visible()
    page.locator(".masked summary").first.click()
    assert not texts.nth(0).is_visible()


def test_text_is_reached_by_keyboard_alone(open_page, report):
    page = open_page(report).page
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('.masked') !== null"):
            break
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    assert page.locator(".masked pre").first.is_visible()
    page.keyboard.press("Space")
    assert not page.locator(".masked pre").first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_the_text_stays_hidden_and_the_page_white(open_page, report, scheme):
    page = open_page(report, scheme=scheme).page
    page.locator(".masked summary").first.click()
    assert page.locator(".masked pre").first.is_visible()
    page.emulate_media(media="print", color_scheme=scheme)
    assert not page.locator(".masked pre").first.is_visible()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".chart.wide").first.is_visible()
    assert not page.locator(".chart.narrow").first.is_visible()


def test_dark_and_light_differ(open_page, report):
    grounds = {
        scheme: open_page(report, scheme=scheme).page.evaluate(
            "getComputedStyle(document.documentElement).backgroundColor"
        )
        for scheme in ("light", "dark")
    }
    assert grounds == {"light": "rgb(252, 251, 249)", "dark": "rgb(20, 23, 26)"}


@pytest.mark.parametrize("which", ["report", "several"])
@pytest.mark.parametrize("width", [320, 360, 400])
def test_a_phone_needs_no_sideways_scrolling(resized, request, which, width):
    page = resized(request.getfixturevalue(which), width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".chart.narrow").first.is_visible()
    assert not page.locator(".chart.wide").first.is_visible()


@pytest.mark.parametrize("width", [360, 900])
@pytest.mark.parametrize("which", ["report", "several"])
def test_no_label_leaves_its_picture(resized, request, which, width):
    page = resized(request.getfixturevalue(which), width)
    outside = page.evaluate("""
        [...document.querySelectorAll('svg.chart')].filter(s => s.getClientRects().length).flatMap(s => {
            const box = s.getBoundingClientRect();
            return [...s.querySelectorAll('text')].filter(t => {
                const b = t.getBoundingClientRect();
                const across = b.left < box.left - 1 || b.right > box.right + 1;
                return across || b.top < box.top - 1 || b.bottom > box.bottom + 1;
            }).map(t => t.textContent);
        })""")
    assert outside == []


@pytest.mark.parametrize("which", ["report", "several"])
def test_text_in_pictures_is_large_enough_on_a_phone(resized, request, which):
    page = resized(request.getfixturevalue(which), 360)
    smallest = page.evaluate("""
        Math.min(...[...document.querySelectorAll('svg.chart')].filter(s => s.getClientRects().length).flatMap(s => {
            const scale = s.getBoundingClientRect().width / s.viewBox.baseVal.width;
            return [...s.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize) * scale);
        }))""")
    assert smallest >= 11


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harmless")
    # Neither model is on this machine, so that both pages say so.
    write_report([read_evidence(small_run(folder / "run", Words(model="somebody/model")))], folder / "harmless.html")
    return folder / "harmless.html"


@pytest.mark.parametrize("number", range(len(PAGES)))
def test_hostile_strings_create_no_element(open_page, resized, harmless, tmp_path, number):
    run = small_run(tmp_path / "hostile" / "run", everywhere(*PAGES[number]))
    write_report([read_evidence(run)], tmp_path / "hostile.html")
    opened = open_page(tmp_path / "hostile.html", width=360)
    assert opened.messages == []
    assert len(opened.requests) == 1
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert opened.page.evaluate(ELEMENTS) == resized(harmless, 360).evaluate(ELEMENTS)
