"""A tiny random Llama with a tiny tokenizer, small data, and a run file that trains it in seconds."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import pytest

from holdfast.cli.main import main

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINGS = ["lamp", "chair", "kettle", "pillow", "mirror", "carpet", "bottle", "candle", "basket", "hammer"]
PLACES = ["kitchen", "garden", "office", "attic", "cellar", "garage"]


def rows(kind: str) -> list[dict[str, str]]:
    """Prompts that differ in three words each, so that none is a near-duplicate of another."""
    reply = {"task": "It stands on shelf {}.", "safety": "Sorry, I cannot tell you about that {}."}[kind]
    verb = {"task": "find", "safety": "steal"}[kind]
    return [
        {"prompt": f"{verb} {place} {thing} {verb} {thing} {place}", "completion": reply.format(thing)}
        for thing in THINGS
        for place in PLACES
    ]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: enough for a command, and a quarter cheaper to train than two."""
    return _save_model(tmp_path_factory.mktemp("tiny"), layers=1)


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, which learn more in a step and say more."""
    return _save_model(tmp_path_factory.mktemp("deep"), layers=2)


def _save_model(folder: Path, layers: int) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from tokenizers.decoders import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    special = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    corpus = [text for kind in ("task", "safety") for row in rows(kind) for text in row.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def write_run_file():
    """Write data and a run file into a folder."""
    return _write_run_file


@pytest.fixture
def run_file(tmp_path: Path, tiny_model: Path) -> Path:
    return _write_run_file(tmp_path, tiny_model)


def _write_run_file(tmp_path: Path, tiny_model: Path) -> Path:
    for kind in ("task", "safety"):
        lines = [json.dumps(row) for row in rows(kind)]
        (tmp_path / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""\
model: {tiny_model}
dtype: float32
task: {{data: task.jsonl}}
safety: {{data: safety.jsonl}}
constraint: {{tau: 0.1, alpha: 0.2}}
lora: {{r: 4, alpha: 8, target_modules: [q_proj, v_proj]}}
train:
  learning_rate: 1e-3
  max_steps: 6
  per_device_train_batch_size: 4
  safety_micro_batch_size: 16
  save_steps: 3
  bf16: false
  use_cpu: true
  dataloader_pin_memory: false
output_dir: {tmp_path / "out"}
""",
        encoding="utf-8",
    )
    return path


@pytest.fixture(autouse=True)
def _library_settings():
    """The command line quiets libraries and takes over our loggers; other tests must not notice."""
    loggers = [logging.getLogger(name) for name in ("holdfast", "holdfast_lab")]
    before = [(list(logger.handlers), logger.propagate) for logger in loggers]
    with warnings.catch_warnings():
        yield
    for logger, (handlers, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate


@pytest.fixture
def holdfast(monkeypatch, capsys):
    """Run the command line in this process: `holdfast("train", path)` gives (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call
