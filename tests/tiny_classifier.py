"""Tiny random classifiers and bases over a byte tokenizer, so that any text has tokens of its own."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "</s>"]


def tokenizer(*, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token=pad)


def config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**(settings | changes))


def word_tokenizer(corpus: list[str]) -> PreTrainedTokenizerFast:
    """The words of the corpus as tokens, anything else byte by byte: short rows, quick to train on."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


def base(folder: Path, *, seed: int = 0, corpus: list[str] | None = None) -> Path:
    """A causal language model."""
    torch.manual_seed(seed)
    chosen = word_tokenizer(corpus) if corpus else tokenizer()
    LlamaForCausalLM(config(vocab_size=len(chosen))).save_pretrained(folder)
    chosen.save_pretrained(folder)
    return folder


def classifier(folder: Path, labels, *, seed: int = 0, scale: float = 20.0, pad: str | None = "<pad>") -> Path:
    """A classifier whose logits differ from text to text; `scale` 0 makes them all zero."""
    torch.manual_seed(seed)
    named = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    made = LlamaForSequenceClassification(config(num_labels=len(labels), **named))
    with torch.no_grad():
        made.score.weight.mul_(scale)
    made.save_pretrained(folder)
    tokenizer(pad=pad).save_pretrained(folder)
    return folder
