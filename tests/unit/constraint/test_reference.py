"""Tables of reference losses: stored, looked up, compared, and refused where they do not belong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from scipy.stats import hypergeom
from tests import tiny

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, DataError
from holdfast.data.encode import Encoded
from holdfast.scoring.completion import CompletionLosses
from holdfast.scoring.forward import Forward
from holdfast.scoring.reference import (
    SPOT_CHECK,
    ReferenceTable,
    cache_folder,
    data_sha256,
    drawn_rows,
    measure_reference,
    reference_table,
    require_same_provenance,
)

PROVENANCE = {"dtype": "float32", "autocast": "no", "first_k": 2, "weights": "abc"}
ROWS = [Encoded(f"e{i}", (3, 4, 5 + i, 9, 10), (-100, -100, 5 + i, 9, 10), False) for i in range(10)]


def forward(seed: int = 0) -> Forward:
    return Forward(tiny.model(seed=seed), pad_token_id=0, batch_size=4, device=torch.device("cpu"))


def table(seed: int = 0) -> ReferenceTable:
    return measure_reference(forward(seed), ROWS, PROVENANCE, 2)


def test_round_trip(tmp_path):
    table().save(tmp_path / "reference")
    loaded = ReferenceTable.load(tmp_path / "reference")
    assert loaded.sha256 == table().sha256
    assert torch.equal(loaded.losses.total, table().losses.total)
    assert loaded.losses.total.dtype == torch.float64


def test_units():
    losses = CompletionLosses(*(torch.tensor(x, dtype=torch.float64) for x in ([6.0, 8.0], [3, 2], [3.0, 8.0], [2, 2])))
    found = ReferenceTable(("a", "b"), losses, PROVENANCE)
    assert found.in_unit(ChanceConstraint(unit="nll_sum")).tolist() == [6.0, 8.0]
    assert found.in_unit(ChanceConstraint(unit="nll_token")).tolist() == [2.0, 4.0]
    assert found.in_unit(ChanceConstraint(unit="nll_first")).tolist() == [1.5, 4.0]
    assert all(found.in_unit(ChanceConstraint(unit=unit)).tolist() == [0.0, 0.0] for unit in ("kl_token", "kl_first"))


def test_rows_come_in_the_order_asked_for():
    whole = table()
    part = whole.rows(["e7", "e2"])
    assert part.losses.total.tolist() == [whole.losses.total[7].item(), whole.losses.total[2].item()]


def test_every_byte_of_the_losses_is_covered_by_the_hash(tmp_path):
    stem = tmp_path / "reference"
    table().save(stem)
    path = stem.with_suffix(".safetensors")
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for at in range(start, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged") as caught:
            ReferenceTable.load(stem)
        assert caught.value.exit_code == 6
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        ReferenceTable.load(stem)


@pytest.mark.parametrize(
    "change", [{"ids": ["x"] * 10}, {"provenance": {**PROVENANCE, "weights": "abd"}}, {"sha256": "0"}]
)
def test_a_record_that_was_edited_is_refused(tmp_path, change):
    stem = tmp_path / "reference"
    table().save(stem)
    path = stem.with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match="damaged"):
        ReferenceTable.load(stem)


def test_differing_keys_are_named_and_long_values_cut(tmp_path):
    stored = {"weights": "a" * 64, "dtype": "float32", "tokenizer": "t"}
    require_same_provenance(stored, dict(stored), tmp_path)
    with pytest.raises(CheckpointError) as caught:
        require_same_provenance(stored, {"weights": "b" * 64, "dtype": "float32", "template": "u"}, tmp_path)
    assert "weights: stored aaaaaaaaaaaa..., now bbbbbbbbbbbb..." in caught.value.what
    assert "tokenizer: stored t, now None" in caught.value.what
    assert "template: stored None, now u" in caught.value.what
    assert "dtype" not in caught.value.what


def test_losses_that_are_not_finite_are_refused_by_id():
    class Broken:
        def losses(self, examples, first_k):
            total = torch.arange(10.0, dtype=torch.float64)
            total[3], total[8] = float("nan"), float("inf")
            return CompletionLosses(total, torch.ones(10), total, torch.ones(10))

    with pytest.raises(DataError, match="2 safety examples is not finite") as caught:
        measure_reference(Broken(), ROWS, PROVENANCE, 2)
    assert "e3, e8" in caught.value.what
    assert caught.value.exit_code == 3


def get(tmp_path, *, seed: int = 0, rows=ROWS, provenance=PROVENANCE, run: str = "run"):
    stem = tmp_path / run / "reference"
    stem.parent.mkdir(exist_ok=True)
    return reference_table(forward(seed), rows, provenance, stem=stem, cache=tmp_path / "cache")


def test_run_folder_first_then_cache(tmp_path):
    first = get(tmp_path)
    assert get(tmp_path, run="other").sha256 == first.sha256
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    assert get(tmp_path).sha256 == first.sha256
    assert (tmp_path / "run" / "reference.json").exists()


def test_order_of_examples_does_not_matter(tmp_path):
    first = get(tmp_path)
    turned = get(tmp_path, rows=ROWS[::-1])
    assert turned.losses.total.tolist() == first.losses.total.tolist()[::-1]


def test_another_models_losses_under_the_right_name_are_caught(tmp_path):
    get(tmp_path)
    with pytest.raises(CheckpointError, match="do not belong to this model"):
        get(tmp_path, seed=1)


def test_data_hash_sees_labels():
    changed = [Encoded(ROWS[0].id, ROWS[0].input_ids, (-100, *ROWS[0].labels[1:-1], -100), False), *ROWS[1:]]
    assert data_sha256(ROWS) != data_sha256(changed)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "env"))
    assert cache_folder(str(tmp_path / "set")) == tmp_path / "set" / "reference"
    assert cache_folder(None) == tmp_path / "env" / "reference"
    monkeypatch.delenv("HOLDFAST_CACHE")
    assert cache_folder(None).parts[-3:] == (".cache", "holdfast", "reference")


def missed(role: int, changed: int) -> float:
    """The probability that no changed row is among those measured again, by the hypergeometric distribution."""
    return float(hypergeom(role, changed, min(role, SPOT_CHECK)).pmf(0))


@pytest.mark.parametrize("role", [20, 134, 135, 400, 5_000, 1_000_000])
def test_the_sample_finds_a_share_of_five_percent(role):
    """And with it any forgery that moves a role's violation rate by 5 points; the one of 90 points for certain."""
    assert missed(role, -(-role // 20)) < 0.001
    assert missed(role, round(0.9 * role)) < 1e-100


def test_the_sample_is_of_each_role_and_never_the_same():
    """A role of 40 rows is not hidden behind one of 4,000; what is measured again cannot be known beforehand."""
    drawn = drawn_rows([4_000, 40])
    assert [at for at in drawn if at >= 4_000] == list(range(4_000, 4_040))
    assert len(drawn) == len(set(drawn)) == SPOT_CHECK + 40
    assert drawn != drawn_rows([4_000, 40])


@pytest.mark.parametrize("column", ["total", "first"])
def test_one_forged_row_of_a_small_table_is_caught(tmp_path, column):
    genuine = get(tmp_path)
    forged = getattr(genuine.losses, column).clone()
    forged[7] += 0.1
    losses = replace(genuine.losses, **{column: forged})
    for place in (tmp_path / "run" / "reference", *(tmp_path / "cache").glob("*.json")):
        ReferenceTable(genuine.ids, losses, genuine.provenance).save(place.with_suffix(""))
    with pytest.raises(CheckpointError, match="do not belong to this model"):
        get(tmp_path)


@pytest.mark.parametrize("column", ["tokens", "first_tokens"])
def test_rows_with_other_numbers_of_tokens_are_refused(tmp_path, column):
    genuine = get(tmp_path)
    losses = replace(genuine.losses, **{column: getattr(genuine.losses, column) + 1})
    ReferenceTable(genuine.ids, losses, genuine.provenance).save(tmp_path / "run" / "reference")
    with pytest.raises(CheckpointError, match="not those of the examples"):
        get(tmp_path)
