"""Settings that ask for more than the tensors in the files have, refused before anything is built from them.

Settings are foreign text: a size or a rank that no tensor has makes transformers and PEFT fill memory, and a pattern
of module names may backtrack for longer than anyone waits.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError, UnsupportedError
from holdfast.core.library_types import LanguageModel, ModelConfig
from holdfast.core.registry import nearest
from holdfast.models.library_errors import one_line_errors
from holdfast.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, settings_in

CPU_S, WALL_S = 2, 60.0  # all module names of the largest models take milliseconds; a busy machine takes its time
# Matches as PEFT would; any error ends it with a code, among them a pattern that is none.
_MATCH = (
    "import json, re, sys\n"
    "pattern, names = json.load(sys.stdin)\n"
    f"try: import resource; resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))\n"
    "except ImportError: pass\n"
    "compiled = re.compile(pattern)\n"
    "for name in names: compiled.fullmatch(name), compiled.match(name)\n"
)
_FORMS = {
    "target_modules": "{}", "exclude_modules": "{}", "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$", "modules_to_save": r"(^|.*\.){}($|\..*)",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
}  # fmt: skip
_LAYER = re.compile(r"\.(\d{1,9})\.")
# A matrix may hold several sizes side by side (fused projections); a size beyond this multiple of the largest
# dimension in the files belongs to another model, and building it would take all memory.
SLACK = 4
SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim")
_PLAIN = re.compile(r"[\w.^$\\-]*", re.ASCII)  # neither repetition nor alternatives, so no backtracking


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor in a file; no tensor is read."""
    from safetensors import safe_open

    with one_line_errors(path, "safetensors file"), safe_open(path, framework="np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (not a dict)


def require_sizes_of(config: ModelConfig, files: list[Path], what: str) -> None:
    """Refuse a configuration that the weights are far too small for, before a model is built.

    Layers: no more than the weights number; other sizes: at most `SLACK` times the largest dimension of a tensor.
    """
    shapes = {name: shape for path in files for name, shape in tensor_shapes(path).items()}
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    layers = 1 + max((int(number) for name in shapes for number in _LAYER.findall(name)), default=-1)
    text = config.get_text_config()
    limits = {"num_hidden_layers": layers} | dict.fromkeys(SIZES, SLACK * largest)
    for name, limit in limits.items():
        asked = getattr(text, name, None)
        if isinstance(asked, int | float) and asked > limit:
            problem = f"{what}: config.json asks for {name} {asked}, its weights lack that: they have room for {limit}"
            raise CheckpointError(problem, remedy="restore config.json, or the weights that belong to it")


def require_loadable(adapter: Path, base: LanguageModel) -> None:
    """Refuse an adapter that PEFT does not know, or whose settings would fill memory or never end."""
    from peft import PeftType

    config = settings_in(adapter / ADAPTER_CONFIG)
    kind, known = config.get("peft_type"), [member.value for member in PeftType]
    if kind not in known:
        what = f"adapter {adapter}: peft_type {str(kind)[:100]!r} is unknown to the installed PEFT"
        raise UnsupportedError(what, remedy=nearest(str(kind)[:100], known))
    _require_ranks(adapter, config)
    _require_patterns(adapter, config, base)


def _require_ranks(adapter: Path, config: Mapping[str, Any]) -> None:
    """A rank is a dimension of a tensor: r x d_in and d_out x r."""
    shapes = tensor_shapes(adapter / ADAPTER_WEIGHTS)
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    patterned = config.get("rank_pattern")
    ranks = [(key, config.get(key)) for key in ("r", "rank", "init_r", "target_r")]
    ranks += [("rank_pattern", value) for value in (patterned.values() if isinstance(patterned, dict) else ())]
    for key, value in ranks:
        if isinstance(value, int | float) and value > largest:
            what = f"adapter {adapter}: its {key} is {value}, the largest dimension of its tensors {largest}"
            raise CheckpointError(what, remedy=f"restore {ADAPTER_CONFIG} as the run saved it")


def _require_patterns(adapter: Path, config: Mapping[str, Any], base: LanguageModel) -> None:
    asked = []
    for key, form in _FORMS.items():
        value = config.get(key)
        if isinstance(value, str) or (isinstance(value, list | dict) and form != "{}"):  # else whole names are listed
            parts = [value] if isinstance(value, str) else map(str, value)
            asked += [(key, form.replace("{}", part)) for part in parts if not _PLAIN.fullmatch(part)]
    names = [name for name, _ in base.named_modules()] if asked else []
    for key, pattern in asked:
        code = limited_run(["-I", "-S", "-c", _MATCH], json.dumps([pattern, names]).encode(), WALL_S)
        if code != 0:
            problem = f"is not matched against the modules within {CPU_S} s" if code < 0 else "is no regular expression"
            what = f"adapter {adapter}: the pattern under {key} {problem}"
            raise CheckpointError(what, remedy=f"write the names of the modules under {key} in {ADAPTER_CONFIG}")


def limited_run(arguments: list[str], given: bytes, wall_s: float, **environment: str) -> int:
    """The exit code of our own code in another interpreter, where it limits itself; negative when it was killed."""
    try:
        return subprocess.run(  # noqa: S603  (our own code in our own interpreter)
            [sys.executable, *arguments], input=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | environment, timeout=wall_s, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1
