"""The model card: our claim, nobody's text lost, no markup from stored values, no example text."""

from __future__ import annotations

import pytest
import yaml
from markdown_it import MarkdownIt
from tests.unit.report.hostile import HOSTILE, everywhere
from tests.unit.report.synthetic import Words, certificate, write_plain_audit, write_run
from tests.unit.report.tree import shape

from holdfast.reporting.card import MARKER, card_text, is_ours_to_write, write_cards
from holdfast.reporting.read import read_evidence

TRL_CARD = """---
base_model: x/y
---

# Model Card for out

This model is a fine-tuned version of [x/y](https://huggingface.co/x/y).
It has been trained using [TRL](https://github.com/huggingface/trl).

## Quick start

```python
print("hello")
```

## Training procedure

This model was trained with SFT.

### Framework versions

- TRL: 1.16.0
- Pytorch: 2.13.0+cpu

## Citations

Cite TRL as:

```bibtex
@software{x}
```
"""


def rendered(card: str) -> str:
    body = card.split("\n---\n", 1)[1]
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(body)


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("card") / "run", certified=certificate(Words()))
    return card_text(read_evidence(folder))


def test_the_card_says_what_the_report_says(harmless):
    assert MARKER in harmless
    assert "With 95 % confidence" in harmless
    assert "**Certified.**" in harmless
    assert "| certify, untouched | 1 of 116 |" in harmless
    assert yaml.safe_load(harmless.split("---\n")[1])["library_name"] == "peft"


@pytest.mark.parametrize("start", range(0, len(HOSTILE), 10))
def test_hostile_strings_create_no_markup(tmp_path, harmless, start):
    words = everywhere(*HOSTILE[start : start + 10])
    card = card_text(read_evidence(write_run(tmp_path / "run", words, certified=certificate(words))))
    assert shape(rendered(card)) == shape(rendered(harmless))
    assert "<" not in card.replace(MARKER, "")


def test_the_markup_test_can_fail(harmless):
    assert shape(rendered(harmless.replace("keywords", "x") + "\n<b>x</b>\n")) != shape(rendered(harmless))


def test_the_card_holds_no_text_of_any_example(tmp_path):
    words = Words(prompt="canary prompt", reply="canary reply", category="canary category")
    card = card_text(read_evidence(write_run(tmp_path / "run", words, certified=certificate(words))))
    assert "canary" not in card


def test_the_card_names_files_without_the_folders_of_this_machine(tmp_path):
    words = Words(model="/home/alice/models/base", setting="/home/alice/task.jsonl")
    card = card_text(read_evidence(write_run(tmp_path / "run", words)))
    assert "alice" not in card
    assert str(tmp_path) not in card
    assert "- model: base\n" in card
    assert "- safety data: safety.jsonl\n" in card


def test_secrets_never_reach_the_card(tmp_path):
    words = Words(
        model="hf_abcdefghijklmnop", setting="https://alice:hunter22@example.org", hardware="sk-abcdefghijklmnop"
    )
    card = card_text(read_evidence(write_run(tmp_path / "run", words)))
    assert "redacted" in card
    assert not [c for c in ("hf_abc", "hunter22", "sk-abc", "hf\\_abc") if c in card]


@pytest.mark.parametrize(
    ("model", "named"), [("org/model-1", True), ("/home/me/model", False), ("a: b/c\nx: y", False)]
)
def test_only_a_hub_id_becomes_the_base_model(tmp_path, model, named):
    card = card_text(read_evidence(write_run(tmp_path / "run", Words(model=model))))
    front = yaml.safe_load(card.split("---\n")[1])
    assert ("base_model" in front) is named
    assert set(front) <= {"base_model", "base_model_relation", "library_name", "pipeline_tag", "tags"}


def peft_card() -> str:
    import importlib.resources

    import jinja2

    text = (importlib.resources.files("huggingface_hub") / "templates" / "modelcard_template.md").read_text()
    return jinja2.Template(text).render(card_data="library_name: peft") + "\n### Framework versions\n\n- PEFT 0.21.2"


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (None, True),
        (f"---\na: 1\n---\n{MARKER}\n# x", True),
        (TRL_CARD, True),
        ("# My adapter\n\nNotes.", False),
        ("", False),
        (TRL_CARD + "\nTrained on our tickets from spring.\n", False),
        ("# Model Card for Model ID\n\nOur support bot, do not use for billing.\n", False),
    ],
)
def test_which_readme_may_be_replaced(tmp_path, text, ours):
    path = tmp_path / "README.md"
    if text is not None:
        path.write_text(text)
    assert is_ours_to_write(path) is ours


def test_pefts_card_is_replaced_unless_somebody_filled_it_in(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(peft_card())
    assert is_ours_to_write(path)
    path.write_text(peft_card().replace("[More Information Needed]", "the support team", 1))
    assert not is_ours_to_write(path)


def test_a_link_is_never_written_through(tmp_path):
    (tmp_path / "elsewhere.md").write_text(MARKER)
    (tmp_path / "README.md").symlink_to(tmp_path / "elsewhere.md")
    assert not is_ours_to_write(tmp_path / "README.md")


def test_cards_go_to_the_run_and_its_adapter_and_own_text_is_kept(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "adapter" / "README.md").write_text("# Mine\n")
    cards = write_cards(read_evidence(folder))
    assert [(card.path.parent.name, card.written) for card in cards] == [("run", True), ("adapter", False)]
    assert (folder / "adapter" / "README.md").read_text() == "# Mine\n"
    (folder / "adapter" / "README.md").unlink()
    assert all(card.written for card in write_cards(read_evidence(folder)))
    assert (folder / "adapter" / "README.md").read_text() == (folder / "README.md").read_text()
    (folder / "adapter").rename(folder / "model")  # every parameter trained
    assert [card.path.parent.name for card in write_cards(read_evidence(folder))] == ["run", "model"]


def test_an_audit_has_no_model_to_describe(tmp_path):
    assert write_cards(read_evidence(write_plain_audit(tmp_path / "audit"))) == []


def test_a_run_that_is_not_finished_gets_no_card(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "result.json").unlink()
    assert write_cards(read_evidence(folder)) == []
    assert not (folder / "README.md").exists()
