"""A tiny model and tokenizer, made in memory."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]


def tiny_llama(seed: int = 0, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, tie_word_embeddings=tied,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def tiny_tokenizer(words: list[str] = WORDS, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, eos_token="<eos>", unk_token="<unk>")
