"""The page: escaped, closed to the network, private, and without anything of the certify split."""

from __future__ import annotations

import base64
import hashlib
import re
import stat

import pytest
import yaml
from jinja2 import UndefinedError
from tests.unit.report.hostile import HOSTILE, PAGES, everywhere, small_run
from tests.unit.report.synthetic import Words, certificate, change, examples, write_plain_audit, write_run
from tests.unit.report.tree import HREFS, names, parse, shape

import holdfast as hf
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.hashing import sha256_file
from holdfast.data.examples import to_utf8
from holdfast.records.run_record import settings_sha256
from holdfast.reporting.page import environment, render, write_report
from holdfast.reporting.read import read_evidence
from holdfast.reporting.views import run_view


def page_of(folder, *, text: bool = True) -> str:
    evidence = [read_evidence(folder)]
    return render(evidence, [run_view(evidence[0], label=evidence[0].name, anchor="run-1", text=text)])


UNKNOWN = Words(model="models/small")
"""A model that is not on this machine, as every hostile name is none."""


@pytest.fixture(scope="module")
def harmless_shape(tmp_path_factory):
    return shape(page_of(small_run(tmp_path_factory.mktemp("harmless") / "run", UNKNOWN)))


@pytest.mark.parametrize("number", range(len(PAGES)))
def test_hostile_strings_create_no_element_and_no_attribute(number, tmp_path, harmless_shape):
    page = page_of(small_run(tmp_path / "run", everywhere(*PAGES[number])))
    assert page.count('<details class="masked">') == 10
    assert shape(page) == harmless_shape


NAMES = [
    t for t in HOSTILE if "/" not in t and "\0" not in t and len(t.encode("utf-8", "replace")) < 200 and to_utf8(t) == t
]


@pytest.mark.parametrize("name", NAMES[::3])
def test_a_hostile_folder_name_creates_no_element(name, tmp_path, harmless_shape):
    assert len(NAMES) > 20
    assert shape(page_of(small_run(tmp_path / name, UNKNOWN))) == harmless_shape


def test_the_shape_test_can_fail(harmless_shape, tmp_path):
    page = page_of(small_run(tmp_path / "run", Words()))
    assert shape(page.replace("How do I", "<b>How</b> do I")) != harmless_shape
    assert shape(page.replace('<pre dir="auto">', '<pre dir="auto" onclick="x">')) != harmless_shape


def test_the_cost_is_a_table_of_the_parts_that_are_known(tmp_path):
    run = write_run(tmp_path / "run")
    assert ">Cost<" not in page_of(run)  # of a run that stored none
    seconds = {"loading": 10.0, "training": 60.0, "monitoring": 30.0}
    change(run / "result.json", cost={"seconds": seconds, "peak_memory": {"host": 3 * 2**29}})
    page = page_of(run).replace("\N{NO-BREAK SPACE}", " ")
    section = re.search(r"<h2>Cost</h2>.*?</section>", page, re.DOTALL)
    assert section is not None
    assert re.findall('<tr><th scope="row">(.*?)</th><td><bdi>(.*?)</bdi></td></tr>', section[0]) == [
        ("reading data and model", "10 s (10 %)"),
        ("training", "60 s (60 %)"),
        ("asking the behaviour monitor&#39;s prompts", "30 s (30 %)"),
        ("in all", "100 s"),
        ("peak memory of the process", "1.50 GiB"),
    ]


@pytest.mark.parametrize("damage", [[], {"seconds": {"training": "long"}}, {"peak_memory": 3}])
def test_a_damaged_cost_is_named(tmp_path, damage):
    run = write_run(tmp_path / "run")
    change(run / "result.json", cost=damage)
    with pytest.raises(CheckpointError, match="cost"):
        page_of(run)


def test_the_text_is_there_and_hidden_characters_are_labelled(tmp_path):
    page = page_of(small_run(tmp_path / "run", everywhere("\u202eabc \x1b[31m <b>")))
    assert "⟨U+202E⟩abc ⟨U+001B⟩[31m &lt;b&gt; (monitor" in page
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]", page)


def test_a_very_long_text_is_cut_and_says_so(tmp_path):
    assert "more characters)" in page_of(small_run(tmp_path / "run", Words(prompt="A" * 30_000)))


@pytest.fixture
def full(tmp_path):
    return write_run(tmp_path / "run", certified=certificate(Words()))


def test_nothing_is_fetched_scripted_or_styled_inline(full):
    page = page_of(full)
    _, errors = parse(page)
    assert errors == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & set(names(page))
    for tag, attributes in shape(page):
        for key, value in attributes:
            assert key != "style", tag
            assert not key.startswith("on"), tag
            assert key not in HREFS or value.startswith("#"), (tag, key, value)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/)", page)


def test_the_policy_allows_this_style_and_nothing_else(full):
    page = page_of(full)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1).replace("&#39;", "'")
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_nothing_of_the_certify_split_is_shown(full, tmp_path):
    page = page_of(full)
    closed = examples(Words(), "certify", 118)
    assert not [e.id for e in closed if e.id in page]
    assert "(certify " not in page
    shown = [e.id for e in examples(Words(), "monitor", 100) if e.id in page]
    assert len(shown) == 10


def test_a_table_that_calls_a_certify_prompt_monitor_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", sizes={"constraint": 5, "monitor": 5, "certify": 5})
    before = page_of(folder)
    ids = [e.id for e in examples(Words(), "monitor", 5)]
    assert all(i in before for i in ids)
    from tests.unit.report.synthetic import split_record

    from holdfast.data.split_record import save_record

    save_record(split_record({"constraint": [], "monitor": ids[1:], "certify": ids[:1]}), folder)
    with pytest.raises(CheckpointError, match=r"not those of splits\.json"):
        page_of(folder)


def test_an_audit_beside_a_certificate_shows_no_example(tmp_path):
    folder = write_plain_audit(tmp_path / "audit")
    assert "(audit " in page_of(folder)
    certificate(Words()).save(folder)
    page = page_of(folder)
    assert "(audit " not in page
    assert "Single examples stay closed" in page


def test_no_text_leaves_the_text_out(full, tmp_path):
    with_text, without = page_of(full), page_of(full, text=False)
    assert "pick the lock" in with_text
    assert "pick the lock" not in without
    assert "cannot help" not in without
    assert "left out on request" in without


@pytest.mark.parametrize("change", ["moved", "edited", "broken"])
def test_moved_or_changed_data_is_said_and_ids_stay(full, tmp_path, change):
    safety = tmp_path / "safety.jsonl"
    if change == "moved":
        safety.unlink()
    elif change == "edited":
        safety.write_text(safety.read_text().replace("(monitor ", "(other "))
    else:
        safety.write_text("{")
    page = page_of(full)
    assert "pick the lock" not in page
    words = {"moved": "no longer where it was", "edited": "10 of these examples", "broken": "cannot be read"}
    assert words[change] in page
    assert page.count("<code>") >= 10


def test_a_page_with_text_is_private_and_one_without_follows_the_umask(full, tmp_path):
    private, public = tmp_path / "a.html", tmp_path / "b.html"
    write_report([read_evidence(full)], private, text=True)
    write_report([read_evidence(full)], public, text=False)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644 & ~_umask()


def _umask() -> int:
    import os

    current = os.umask(0)
    os.umask(current)
    return current


def test_secrets_never_reach_the_page(tmp_path):
    canaries = ["hf_abcdefghijklmnop", "sk-abcdefghijklmnop", "AKIAABCDEFGHIJKLMNOP", "alice:hunter22"]
    words = Words(
        model=canaries[0], setting=f"https://{canaries[3]}@example.org", hardware=canaries[1], statement=canaries[2]
    )
    folder = write_run(tmp_path / "run", words, certified=certificate(words))
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "hub: {api_key: canary-key, hub_token: canary-token}\n")
    change(folder / "result.json", config_sha256=settings_sha256(yaml.safe_load(config.read_text())),
           config_file_sha256=sha256_file(config))  # fmt: skip
    page = page_of(folder)
    assert "[redacted]" in page
    assert not [c for c in [*canaries, "canary-key", "canary-token"] if c in page]


def test_an_undefined_name_or_a_bare_value_is_an_error():
    with pytest.raises(TypeError, match="StrictUndefined"):
        environment().from_string("{{ nothing }}").render()
    with pytest.raises(UndefinedError, match="nothing"):
        environment().from_string("{% if nothing %}{% endif %}").render()
    for value in (None, 1.5, True, ["x"]):
        with pytest.raises(TypeError, match="expected words"):
            environment().from_string("{{ value }}").render(value=value)


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast of two hex colours."""

    def light(colour: str) -> float:
        full = colour * 2 if len(colour) == 3 else colour
        channels = [int(full[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_text_colour_has_real_contrast_in_light_dark_and_print(full):
    assert contrast("fff", "000") == pytest.approx(21)
    style = re.search(r"<style>(.*?)</style>", page_of(full), re.DOTALL).group(1)
    blocks = re.findall(r":root\s*\{([^}]*--paper[^}]*)\}", style)
    assert len(blocks) == 3
    for block in blocks:
        colours = dict(re.findall(r"--(\w+): #([0-9a-f]{3,6});", block))
        for name in ("ink", "muted", "held", "steer", "sure", "bad", "warn", "good"):
            for ground in ("paper", "wash", "over"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground, colours[ground])


def test_a_report_from_python_is_that_of_the_command(tmp_path):
    run = small_run(tmp_path / "run", Words())
    done = hf.report(run, output=tmp_path / "page.html", text=False)
    assert done.path.read_text() == page_of(run, text=False)
    assert run / "README.md" in [card.path for card in done.cards if card.written]
    assert done.runs[0].verdict.title in done.path.read_text()
    with pytest.raises(ConfigError, match="no run"):
        hf.report()


def test_the_heading_is_what_happened_and_the_claim_is_small(tmp_path):
    page = page_of(write_run(tmp_path / "run", certified=certificate(Words())))
    (heading,) = re.findall(r'<h1 class="claim">(.*?)</h1>', page)
    (details,) = re.findall(r'<p class="lead">(.*?)</p>', page)
    assert heading.replace("\xa0", " ").startswith(
        "Still refused: 115 of 116 tested groups of prompts (at most 4.03 % lost, with 95 % confidence): certified."
    )
    assert details.replace("\xa0", " ").startswith("With 95 % confidence")
