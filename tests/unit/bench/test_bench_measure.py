"""One measurement: figures of real trainers, errors in words, nothing left changed."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import MethodType, SimpleNamespace

import pytest
import torch
import transformers.trainer
from transformers.models.llama import modeling_llama

from holdfast.core.errors import UnsupportedError
from holdfast.training import fingerprint as training
from holdfast_lab.bench import paths
from holdfast_lab.bench import run as measuring
from holdfast_lab.bench.paths import CONSTRAINT_ROWS, Material, best_of_trl, build, safety_pairs, task_pairs
from holdfast_lab.bench.run import measure, reference_throughput, step_figures
from holdfast_lab.bench.settings import PATHS, Settings

SETTINGS = Settings(
    shapes=("tiny",), paths=tuple(PATHS), steps=2, warm_up=0, batch=3, safety_batch=2, checkpointing=(False,), rank=4
)
CELLS = {cell.path: cell for cell in SETTINGS.cells("tiny")}


def tokens(row: dict) -> float:
    return row["tokens_per_s"] * sum(row["steps_ms"]) / 1e3


@pytest.mark.parametrize("path", ["trl_sft", "two_pass"])
def test_tokens_are_those_of_the_rows_without_padding(path, tmp_path):
    row = measure(replace(CELLS[path], safety_batch=CONSTRAINT_ROWS // 2), tmp_path)  # two steps take every row once
    assert "error" not in row
    assert len(row["steps_ms"]) == 2
    expected = sum(map(sum, task_pairs("sst2", 6, seed=42)))
    if path == "two_pass":
        expected += sum(map(sum, safety_pairs(CONSTRAINT_ROWS, seed=42)))
        assert sum(row["events"].values()) == 2
    assert tokens(row) == pytest.approx(expected, rel=1e-3)
    assert row["peak_mib"] is None or row["peak_mib"] > 0


@pytest.fixture
def installed(monkeypatch):
    """Says which packages there are, on a machine without a GPU: `installed("flash_attn_2", "liger_kernel")`."""

    def only(*names: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for name in ("flash_attn_2", "flash_attn_3", "liger_kernel"):
            monkeypatch.setattr(paths, f"is_{name}_available", lambda name=name: name in names)
        monkeypatch.setattr(paths, "find_spec", lambda name: name in names or None)

    return only


def test_trl_without_padding_takes_the_same_rows_a_step(tmp_path, installed):
    installed()
    padded, best = (measure(CELLS[path], tmp_path) for path in ("trl_sft", "trl_best"))
    assert tokens(best) == pytest.approx(tokens(padded), rel=1e-3)
    assert padded["trl"] == {"padding_free": False, "packing": False, "attention": "sdpa", "liger": False}
    assert best["trl"] == padded["trl"] | {"padding_free": True}
    assert padded["log"] == []
    assert "no flash-attention" in best["log"][0]
    assert "trl" not in measure(CELLS["sft"], tmp_path)


def test_trl_without_padding_trains_the_same(tmp_path, installed, monkeypatch):
    """A row of a batch sees no other; where positions run on from one to the next, it does."""
    installed()

    def loss(path: str) -> float:
        trainer = build(CELLS[path], Material.of(CELLS[path]), tmp_path, tmp_path, [])
        return float(trainer.train().training_loss)

    padded = loss("trl_sft")
    assert loss("trl_best") == pytest.approx(padded, rel=1e-6)
    inner = modeling_llama.LlamaModel.forward
    monkeypatch.setattr(
        modeling_llama.LlamaModel, "forward", lambda self, *_, position_ids, **given: inner(self, **given)
    )
    assert loss("trl_best") != pytest.approx(padded, rel=1e-6)


@pytest.mark.parametrize(
    ("names", "attention", "liger"),
    [
        (("flash_attn_2",), ["flash_attention_2"], False),
        (("flash_attn_2", "flash_attn_3", "liger_kernel"), ["flash_attention_3"], True),
        (("liger_kernel",), [], True),
    ],
)
def test_the_best_of_trl_is_what_is_installed(installed, monkeypatch, names, attention, liger):
    installed(*names)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked: list[str] = []
    model = SimpleNamespace(config=SimpleNamespace(), set_attn_implementation=asked.append)
    assert best_of_trl(model)["use_liger_kernel"] is liger
    assert asked == attention
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert best_of_trl(model)["use_liger_kernel"] is False


@pytest.mark.parametrize("there", [(), ("fla",), ("causal_conv1d",)])
def test_trl_without_padding_is_refused_where_rows_would_run_together(tmp_path, installed, there):
    installed(*there)
    row = measure(replace(CELLS["trl_best"], shape="tiny-hybrid"), tmp_path)
    assert "no flash-linear-attention and causal-conv1d" in row["error"]
    installed("fla", "causal_conv1d")
    assert best_of_trl(SimpleNamespace(config=SimpleNamespace(layer_types=["linear_attention"])))["padding_free"]


def test_liger_is_recorded_and_stays_with_its_path(tmp_path, installed, monkeypatch):
    """It changes the modules of the model, and in the architecture's module what later models are made of."""
    installed("liger_kernel")
    found = []

    def forward(self, states):
        return modeling_llama.LlamaRMSNorm.forward(self, states)

    forward.__module__ = "liger_kernel.transformers.rms_norm"

    def apply(model, config):
        norm = model.get_base_model().model.norm
        norm.forward = MethodType(forward, norm)
        monkeypatch.setattr(modeling_llama, "LlamaMLP", object)
        found.append((modeling_llama.LlamaMLP, config))

    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", apply)
    monkeypatch.setattr(measuring, "build", lambda *given: _with_liger(build(*given)))
    before = modeling_llama.LlamaMLP
    assert measure(CELLS["trl_best"], tmp_path)["trl"]["liger"] is True
    assert found == [(object, None)]
    assert modeling_llama.LlamaMLP is before


def _with_liger(trainer):
    """Asked for after the trainer's own look at the machine, which has no GPU."""
    trainer.args.use_liger_kernel = True
    return trainer


def test_warm_up_steps_do_not_count(tmp_path):
    with_one = measure(replace(CELLS["trl_sft"], warm_up=1, steps=1), tmp_path)
    everything = measure(CELLS["trl_sft"], tmp_path)  # the same six rows in the same order
    assert len(with_one["steps_ms"]) == 1
    assert 0 < tokens(with_one) < 0.9 * tokens(everything)


def test_a_tiny_tau_makes_the_filter_work(tmp_path):
    settings = Settings(shapes=("tiny",), steps=4, warm_up=0, batch=3, safety_batch=8, tau=1e-6)
    cell = next(cell for cell in settings.cells("tiny") if cell.path == "two_pass")
    assert measure(cell, tmp_path)["events"].get("active", 0) > 0


def test_weights_are_not_hashed_and_nothing_stays_changed(tmp_path, monkeypatch):
    def hashed(_):
        raise AssertionError("hashed")

    monkeypatch.setattr(training, "frozen_fingerprint", hashed)
    logger = logging.getLogger("holdfast")
    before = list(logger.handlers), logger.level, logger.propagate
    assert "error" not in measure(CELLS["two_pass"], tmp_path)
    assert training.frozen_fingerprint is hashed  # type: ignore[attr-defined]
    assert (list(logger.handlers), logger.level, logger.propagate) == before
    assert len(list((tmp_path / "reference").glob("*.json"))) == 1  # shared with the other paths of this shape


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UnsupportedError("no such step", remedy="another"), "no such step"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "out of memory"),
        (ValueError("first line\nsecond"), "ValueError: first line"),
    ],
)
def test_a_failure_becomes_a_row(tmp_path, monkeypatch, error, text):
    def fails(*_):
        raise error

    monkeypatch.setattr(measuring, "build", fails)
    row = measure(CELLS["fused"], tmp_path)
    assert row == {"shape": "tiny", "path": "fused", "checkpointing": False, "error": text}


def test_an_interrupt_is_not_a_failed_path(tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "build", stopped)
    with pytest.raises(KeyboardInterrupt):
        measure(CELLS["fused"], tmp_path)


def test_figures_of_steps():
    found = step_figures([0.1, 0.2, 0.3, 0.4, 1.0], 400)
    assert found["median_ms"] == pytest.approx(300)
    assert found["p90_ms"] == pytest.approx(760)
    assert found["tokens_per_s"] == pytest.approx(200)
    assert step_figures([0.5], 1)["p90_ms"] == pytest.approx(500)


def test_reference_throughput_counts_every_row_once():
    found = reference_throughput("tiny", SETTINGS, n=12)
    assert (found["rows"], found["tokens"]) == (12, sum(map(sum, safety_pairs(12, seed=42))))
    assert found["share"] == pytest.approx(found["bare_ms"] / found["losses_ms"])
