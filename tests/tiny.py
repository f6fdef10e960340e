"""A tiny random Llama and a word-level tokenizer with a chat template: enough to train on in milliseconds."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
WORDS = [f"w{i}" for i in range(57)]


def tokenizer(*, chat: bool = True, pad: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", **({"pad_token": "<pad>"} if pad else {})
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    if chat:
        made.chat_template = CHAT_TEMPLATE
    return made


def model(*, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    made = LlamaForCausalLM(config)
    with torch.no_grad():  # logits of a size at which losses differ between examples
        made.lm_head.weight.mul_(8)
    return made.to(dtype)


def saved(folder: Path, **kwargs) -> Path:
    model(**kwargs).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def lora(dropout: float = 0.0, **kwargs) -> LoraConfig:
    return LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=dropout,
        target_modules=["q_proj", "k_proj", "v_proj"],
        task_type="CAUSAL_LM",
        **kwargs,
    )


def fresh(**settings) -> PeftModel:
    return get_peft_model(model(), lora(**settings))


def continued(**settings) -> PeftModel:
    """An adapter that has been trained before: switching it off is not theta_0."""
    made = fresh(**settings)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if ".lora_B." in name:
                p.copy_(torch.randn(p.shape, generator=draw) * 0.2)
    return made


def tied() -> LlamaForCausalLM:
    """The head and the embedding in one tensor."""
    made = model()
    made.config.tie_word_embeddings = True
    made.lm_head.weight = made.model.embed_tokens.weight
    with torch.no_grad():  # logits large enough for losses to differ, too small to predict the input token again
        made.lm_head.weight.mul_(4)
    return made


def rows(n: int, *, seed: int, start: str = "w0", length: int = 5) -> list[dict[str, str]]:
    """Random prompts that begin with `start`, with short random completions."""
    draw = torch.Generator().manual_seed(seed)

    def words(count: int) -> str:
        return " ".join(WORDS[i] for i in torch.randint(1, len(WORDS), (count,), generator=draw).tolist())

    return [{"prompt": f"{start} {words(length + i % 3)} ", "completion": words(3 + i % 4)} for i in range(n)]


def dataset(n: int, *, seed: int, start: str = "w0") -> Dataset:
    return Dataset.from_list(rows(n, seed=seed, start=start))
