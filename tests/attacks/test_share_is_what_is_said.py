"""A1: most prompts are variants of one template, all of them regress, and the certificate says that at most 5 % do.

The first release tested groups of near-duplicates and spoke of prompts; in a sequence it left near-duplicates out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.auditing.certificate_spec import read_prompts
from holdfast.auditing.opening import open_certify
from holdfast.certification import assessment
from holdfast.certification.assessment import STRENGTHS, assess
from holdfast.certification.terms import Rows, Terms
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import DataError
from tests import tiny

HELD, VARIANTS = 160, 400
BROKEN = "w56"  # a word whose embedding differs between the two models


def table(held: int = 100, variants: int = VARIANTS, *, strength: float = math.nan) -> Rows:
    """Unlike prompts that hold, then variants of one template that all regress."""
    n = held + variants
    return Rows(
        [f"{i:04d}" for i in range(n)],
        np.repeat([0.0, 1.0], [held, variants]),
        np.minimum(np.arange(n), held),
        ["every"] * n,
        np.full(n, strength),
    )


def terms(kind: str, *, confidence: float = 0.95, pool: int | None = None) -> Terms:
    return Terms(kind, 0.1, 0.05, confidence, 1, pool, "nll_token")


@pytest.mark.parametrize("kind", ["fixed", "per_category"])
def test_four_fifths_of_the_prompts_regress_in_one_group(kind):
    """A1: 400 of 500 prompts regress, 1 of 101 groups."""
    found = assess(table(), terms(kind))
    assert not found["certified"], found["statement"]


def test_no_strength_passes_where_one_group_regresses():
    """A1: the same at every adapter strength, searched as `holdfast certify --strength` searches."""
    asked, pieces = terms("strength"), []
    for strength in STRENGTHS:
        pieces.append(table(strength=strength))
        if assessment.tested_at(pieces[-1], strength, asked).p_value > asked.level:
            break
    found = assess(Rows.joined(pieces), asked)
    assert not found["certified"], found["statement"]


def test_a_sequence_in_which_more_than_alpha_regress_by_now():
    """A1: certified after 88 prompts, then every prompt regressed; the certificate stayed, with a warning."""
    good = table(100, 0)
    bad = Rows([f"b{i}" for i in range(400)], np.ones(400), np.arange(100, 500), ["every"] * 400, np.full(400, np.nan))
    found = assess(Rows.joined([good, bad]), terms("sequential"))
    assert not found["certified"], found["statement"]


def test_a_sample_of_which_more_than_alpha_regress():
    """A1: 19 of 20 listed prompts measured, 1 regressed: 5.3 % of the sample, certified as at most 5 %."""
    found = assess(table(18, 1), terms("finite_pool", confidence=0.9, pool=20))
    assert not found["certified"], found["statement"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that differ in one word, and prompts of which the variants of one template hold it."""
    folder = tmp_path_factory.mktemp("template")
    before = tiny.saved(folder / "before")
    model = tiny.LlamaForCausalLM.from_pretrained(before)
    with torch.no_grad():
        row = tiny.tokenizer().convert_tokens_to_ids(BROKEN)
        weight = model.get_input_embeddings().weight
        weight[row] += 5 * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder / "after")
    tiny.tokenizer().save_pretrained(folder / "after")
    held = [row for row in tiny.rows(2 * HELD, seed=3) if BROKEN not in " ".join(row.values()).split()][:HELD]
    words = [*tiny.WORDS[:30], *[BROKEN] * 6]
    variants = [
        {"prompt": " ".join([tiny.WORDS[i % 50], *words, tiny.WORDS[i // 50]]), "completion": "w1 w2 w3"}
        for i in range(VARIANTS)
    ]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*held, *variants]), encoding="utf-8")
    return {"before": before, "after": folder / "after", "data": data}


@pytest.mark.parametrize("kind", [[], ["--anytime"]], ids=["fixed", "anytime"])
def test_the_command_does_not_certify_a_broken_template(command, scene, tmp_path, kind):
    """A1: by the command line: a model that breaks one template, which makes up five prompts of seven."""
    found = command(
        "certify", "--before", scene["before"], "--after", scene["after"], "--prompts", scene["data"], "--by", "kl",
        "--tau", 0.01, "--output", tmp_path / "out", "--ledger", tmp_path / "ledger.json", *kind,
    )  # fmt: skip
    assert found.code in (3, 4), found.out


def test_a_sequence_with_near_duplicates_is_refused(scene, tmp_path):
    """A1: the same prompt again is left out of the sequence unseen; it must be refused by name."""
    rows = [json.loads(line) for line in scene["data"].read_text(encoding="utf-8").splitlines()[:HELD]]
    again = [{"prompt": rows[0]["prompt"], "completion": f"w{i} w{i + 1}"} for i in range(2, 50)]
    data = tmp_path / "again.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *again]), encoding="utf-8")
    assert len(read_prompts(str(data)).ids) == HELD + len(again)
    with pytest.raises(DataError, match="nearly equal an earlier one"):
        open_certify(
            scene["before"], scene["after"], str(data), ChanceConstraint(tau=0.1, alpha=0.05, unit="nll_token"),
            output=tmp_path / "out", kind="sequential",
        )  # fmt: skip
