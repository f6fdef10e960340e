"""The largest safe strength: one opening, stopped at the first failure; the adapter written is what was measured."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from peft import PeftModel
from safetensors.torch import load_file
from tests import tiny
from tests.unit.auditing.certifying import Scene, scene, write_safety

from holdfast.auditing import measures
from holdfast.auditing.issuing import write_strength
from holdfast.auditing.measure import measure_pair
from holdfast.auditing.pair import open_pair
from holdfast.auditing.verify import verify
from holdfast.certification.binomial import p_value
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, ConfigError, InfeasibleError
from holdfast.data.encode import encode
from holdfast.data.examples import as_chat, make_example
from holdfast.models.content import content_of

# At this tau the adapter passes at some strengths and fails at full strength.
LIMIT = ChanceConstraint(tau=0.05, alpha=0.2, unit="nll_token")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory):
    made = scene(tmp_path_factory.mktemp("strength"), size=0.12)
    tiny.tokenizer().save_pretrained(made.adapter)
    return made, made.certify(kind="strength", constraint=LIMIT)


def degradations(before: Path, after: Path, *, strength: float | None = None) -> dict[str, float]:
    rows = sorted((as_chat(make_example(**row)) for row in tiny.rows(20, seed=3)), key=lambda e: e.id)
    encoded = [encode(row, tiny.tokenizer(), max_length=None) for row in rows]
    with open_pair(before, after) as pair:
        if strength is not None:
            pair.set_strength(strength)
        found = measure_pair(pair, encoded, first_k=8, kl=False).degradation("nll_token")
    return dict(zip([item.id for item in encoded], found.tolist(), strict=True))


def test_the_search_stops_at_the_first_failure(searched):
    _, record = searched
    tested = record.strength["tested"]
    chosen = record.strength["chosen"]
    assert 0.1 <= chosen < 1.0, "the scene must pass at some strengths only, or this shows nothing"
    assert [one["strength"] for one in tested] == [i / 10 for i in range(1, len(tested) + 1)]
    assert [one["passed"] for one in tested] == [True] * (len(tested) - 1) + [False]
    assert tested[-2]["strength"] == chosen
    assert all(one["p_value"] == p_value(one["regressions"], one["n"], 0.2) for one in tested)
    assert (record.certified, record.kind, record.certified_tau) == (True, "strength", None)
    assert (record.regressions, record.n, record.examples) == (tested[-2]["regressions"], 20, 20)
    assert f"at adapter strength {chosen:g}" in record.statement
    assert record.openings["this"] == 1


def test_the_written_adapter_reproduces_what_was_measured_bit_for_bit(searched):
    made, record = searched
    written = Path(record.strength["adapter"])
    assert written == made.output / f"adapter-strength-{record.strength['chosen']:g}"
    table = pq.read_table(made.output / "certificate.parquet").to_pydict()
    at = [strength == record.strength["chosen"] for strength in table["strength"]]
    measured = {i: d for i, d, chosen in zip(table["id"], table["degradation"], at, strict=True) if chosen}
    assert degradations(made.base, written) == measured
    assert degradations(made.base, made.adapter) != measured


def test_any_peft_reader_gets_the_scaled_adapter(searched):
    made, record = searched
    original = load_file(made.adapter / "adapter_model.safetensors")
    scaled = load_file(Path(record.strength["adapter"]) / "adapter_model.safetensors")
    assert set(original) == set(scaled)
    for name, tensor in original.items():
        factor = record.strength["chosen"] if "lora_B" in name else 1
        assert (scaled[name] == tensor * factor).all()
    base = tiny.LlamaForCausalLM.from_pretrained(made.base)
    model = PeftModel.from_pretrained(base, record.strength["adapter"])
    names = {path.name for path in Path(record.strength["adapter"]).iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"}
    config = "adapter_config.json"
    assert (Path(record.strength["adapter"]) / config).read_bytes() == (made.adapter / config).read_bytes()
    assert model.peft_config["default"].r == 4


def test_the_certificate_is_bound_to_the_written_adapter(searched):
    made, record = searched
    assert record.bound["after_sha256"] == content_of(record.strength["adapter"]).sha256
    assert record.strength["original_sha256"] == content_of(made.adapter).sha256
    assert record.places["after"] == record.strength["adapter"]
    assert verify(made.output) == record


def test_a_changed_written_adapter_is_caught(searched):
    _, record = searched
    path = Path(record.strength["adapter"]) / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        with pytest.raises(CheckpointError, match=r"the model after .* was changed"):
            verify(Path(record.strength["adapter"]).parent)
    finally:
        path.write_bytes(data)


def test_a_search_is_one_opening_and_no_plain_certificate_may_follow(searched, tmp_path):
    made, _ = searched
    with pytest.raises(InfeasibleError, match="undeclared"):
        made._replace(output=tmp_path / "plain").certify(constraint=LIMIT)


def test_when_no_strength_passes_no_adapter_is_written(searched, tmp_path):
    made = _fresh(searched[0], tmp_path)
    record = made.certify(kind="strength", constraint=ChanceConstraint(tau=1e-4, alpha=0.2, unit="nll_token"))
    assert not record.certified
    assert (record.strength["chosen"], record.strength["adapter"], len(record.strength["tested"])) == (None, None, 1)
    assert record.places["after"] == str(made.adapter)
    assert record.bound["after_sha256"] == content_of(made.adapter).sha256
    assert sorted(path.name for path in made.output.iterdir()) == ["certificate.json", "certificate.parquet"]
    assert verify(made.output) == record


def test_all_strengths_may_pass(searched, tmp_path, monkeypatch):
    made = _fresh(searched[0], tmp_path)
    constant = type("M", (), {"degradation": lambda self, unit: np.zeros(20)})
    monkeypatch.setattr(measures, "measure_pair", lambda *_, **__: constant())
    record = made.certify(kind="strength", constraint=LIMIT)
    assert record.strength["chosen"] == 1.0
    assert len(record.strength["tested"]) == 10
    written = load_file(Path(record.strength["adapter"]) / "adapter_model.safetensors")
    original = load_file(made.adapter / "adapter_model.safetensors")
    assert all((written[name] == tensor).all() for name, tensor in original.items())


def test_a_folder_with_something_else_is_not_overwritten(searched, tmp_path):
    made, record = searched
    folder = tmp_path / "adapter-strength-0.3"
    shutil.copytree(made.adapter, folder)
    before = (folder / "adapter_model.safetensors").read_bytes()
    with open_pair(made.base, made.adapter) as pair, pytest.raises(ConfigError, match="holds something else"):
        write_strength(pair, 0.3, folder)
    assert (folder / "adapter_model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [folder.name], "nothing temporary is left"
    again = Path(record.strength["adapter"])
    with open_pair(made.base, made.adapter) as pair:
        write_strength(pair, record.strength["chosen"], again)  # the same content is fine


def _fresh(made: Scene, folder: Path) -> Scene:
    safety = write_safety(folder / "safety.jsonl", tiny.rows(20, seed=3))
    return made._replace(safety=safety, output=folder / "out")
