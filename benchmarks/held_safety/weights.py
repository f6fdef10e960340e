"""A GGUF file's tensors as `model.safetensors`, on all cores: seconds where transformers takes minutes.

    weights.py table GGUF FOLDER OUT.json     FOLDER: the same file as transformers converted it
    weights.py make TABLE.json GGUF FOLDER    writes FOLDER/model.safetensors; PROCS processes (default: all cores)

The table names each tensor's place and type in the GGUF file and the digest that the result must have, so `make` needs
neither transformers nor a parser. A result with another digest is removed and refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

CHUNK = 4 << 20  # bytes of the file that one process takes at a time
NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def named(tensor: str) -> str:
    """The name that transformers gives a tensor of a Qwen2 GGUF file; Llama's have other queries and keys."""
    stem, kind = tensor.rsplit(".", 1)
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer:
        return f"model.layers.{layer[1]}.{NAMES[layer[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def table(gguf: Path, folder: Path) -> dict[str, Any]:
    """Where each tensor lies in `gguf`, and the digest of `folder`'s weights."""
    from gguf import GGUFReader

    tensors = [
        {
            "name": named(tensor.name),
            "type": int(tensor.tensor_type),
            "offset": int(tensor.data_offset),
            "bytes": int(tensor.n_bytes),
            "shape": [int(size) for size in reversed(tensor.shape)],
        }
        for tensor in GGUFReader(gguf).tensors
    ]
    return {"sha256": digest(folder / "model.safetensors"), "tensors": tensors}


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def piece(job: tuple[str, int, int, int]) -> bytes:
    """The bytes at one place of a file, dequantised and rounded to bfloat16."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, dequantize

    path, kind, offset, size = job
    data = np.fromfile(path, np.uint8, size, offset=offset)
    quantization = GGMLQuantizationType(kind)
    if quantization.name in ("F32", "F16"):
        data = data.view(np.float32 if quantization.name == "F32" else np.float16)
    values = torch.from_numpy(np.ascontiguousarray(dequantize(data, quantization), np.float32).reshape(-1))
    return values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def make(plan: dict[str, Any], gguf: Path, folder: Path) -> None:
    import torch
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from safetensors.torch import save_file

    jobs, owners = [], []
    for tensor in plan["tensors"]:
        step = CHUNK - CHUNK % GGML_QUANT_SIZES[GGMLQuantizationType(tensor["type"])][1]
        for start in range(0, tensor["bytes"], step):
            jobs.append((str(gguf), tensor["type"], tensor["offset"] + start, min(step, tensor["bytes"] - start)))
            owners.append(tensor["name"])
    parts: dict[str, list[bytes]] = {}
    with ProcessPoolExecutor(int(os.environ.get("PROCS", os.cpu_count() or 1))) as pool:
        for owner, part in zip(owners, pool.map(piece, jobs, chunksize=4), strict=True):
            parts.setdefault(owner, []).append(part)
    weights = {}
    for tensor in plan["tensors"]:
        whole = bytearray(b"".join(parts.pop(tensor["name"])))
        weights[tensor["name"]] = torch.frombuffer(whole, dtype=torch.bfloat16).view(tensor["shape"])
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "model.safetensors"
    save_file(weights, target, metadata={"format": "pt"})
    if (found := digest(target)) != plan["sha256"]:
        target.unlink()
        wanted = f"expected {plan['sha256']}"
        raise SystemExit(f"{gguf}: the weights have sha256 {found}, {wanted}: a broken file or another table")


def main() -> None:
    match sys.argv[1:]:
        case ["table", gguf, folder, out]:
            Path(out).write_text(json.dumps(table(Path(gguf), Path(folder))))
        case ["make", plan, gguf, folder]:
            make(json.loads(Path(plan).read_text()), Path(gguf), Path(folder))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
