"""What the card of a trained model cites, as TRL writes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
import yaml
from huggingface_hub import ModelCard
from tests.unit.trainers import preferring
from tests.unit.trainers.building import build
from trl import DPOTrainer, SFTTrainer

from holdfast.certification.kept import ANSWERS, COVERAGE, REFUSALS, Kept
from holdfast.defenses.holdfast import Holdfast
from holdfast.reporting.card import is_ours_to_write
from holdfast.training import monitored as citation
from holdfast_lab.defenses.lisa import Lisa

ROOT = Path(__file__).parents[3]


def test_a_pushed_model_cites_the_paper(tmp_path, monkeypatch):
    pushed = {}

    def upload(folder_path, **_):
        pushed["card"] = (Path(folder_path) / "README.md").read_text(encoding="utf-8")

    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: SimpleNamespace(upload_folder=upload))
    trainer = build(tmp_path)
    trainer.hub_model_id = "somebody/a-model"
    trainer.push_to_hub()
    _, front, text = pushed["card"].split("---\n", 2)
    assert {"trl", "sft", "holdfast"} <= set(yaml.safe_load(front)["tags"])
    assert "model-index" not in yaml.safe_load(front)  # nothing was asked
    figures = {REFUSALS: Kept(38, 40, 0.05), ANSWERS: Kept(40, 40, 0.1), COVERAGE: Kept(3, 4, 0.1)}
    asked = SimpleNamespace(step=7, known={3: {REFUSALS: Kept(0, 40, 0.05)}, 7: figures})
    monkeypatch.setattr(trainer, "behaviour_monitor", asked)
    trainer.push_to_hub()
    read: Any = ModelCard(pushed["card"])
    found = {one.metric_type: (one.metric_value, one.metric_args["of"]) for one in read.data.eval_results}
    assert found == {REFUSALS: (0.95, 40), ANSWERS: (1.0, 40)}
    assert read.text.strip() == text.strip()
    assert "This model was trained with SFT with holdfast.\n" in text
    assert is_ours_to_write(tmp_path / "run" / "README.md")  # `holdfast report` may put its own there
    assert trainer.method == "SFT"  # what refusals go by (training/support.py)
    assert f"Cite SFT with holdfast as:\n\n```bibtex\n{citation.CITATION}\n```" in text


def test_dpo_cites_the_paper_and_its_own(tmp_path):
    trainer = preferring.safe("dpo", tmp_path)
    trainer.create_model_card(model_name="a-model")
    text = (Path(trainer.args.output_dir) / "README.md").read_text(encoding="utf-8")
    assert "This model was trained with DPO with holdfast.\n" in text
    assert trainer.method == "DPO"
    cited = text.partition("Cite DPO with holdfast as:")[2]
    assert citation.CITATION in cited
    assert DPOTrainer._paper["citation"] in cited


def test_plain_training_has_the_card_of_trl(tmp_path):
    trainer = build(tmp_path, given={"safety_dataset": None, "constraint": None, "defense": "sft"})
    assert (trainer._name, trainer._paper) == (SFTTrainer._name, SFTTrainer._paper)


def test_another_defense_cites_its_own_paper():
    assert citation.citation_of(Holdfast()) == citation.CITATION
    assert "Huang et al., Lisa, NeurIPS 2024" in citation.citation_of(Lisa())
    assert citation.PAPER not in citation.citation_of(Lisa())


def test_the_citation_is_that_of_the_repository():
    stored = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"][0]
    authors = " and ".join(f"{person['given-names']} {person['family-names']}" for person in stored["authors"])
    assert f"{{{{{stored['title']}}}}}" in citation.CITATION
    assert f"{{{authors}}}" in citation.CITATION
