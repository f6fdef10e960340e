"""Parts of model cards: behaviour kept as a hub lists it, and how an adapter on another adapter is loaded.

PEFT alone leaves the lower adapter out without an error.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD_MARKER = "<!-- written by holdfast report; edits are overwritten while this line stands -->"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

# Weights, their settings and the tokenizer, by name: what of a trained folder belongs to the model.
ADAPTER_FILES = ("adapter_config.json", "adapter_model*.safetensors", "tokenizer*", "special_tokens_map.json",
                 "chat_template.jinja", "vocab*", "merges.txt", "added_tokens.json")  # fmt: skip
MODEL_FILES = (*ADAPTER_FILES[2:], "config.json", "generation_config.json", "model*.safetensors*")

MODEL_NAME = "Fine-tuned model, measured by holdfast"
TASK = {"type": "text-generation", "name": "Text generation"}
WATCHED = {"type": "holdfast-monitor-prompts", "name": "Prompts that the behaviour monitor asked"}
KEPT = {"refusals_kept": "Share of refusals kept", "answers_kept": "Share of answers kept"}


def kept_results(figures: Mapping[str, Any]) -> list[dict[str, object]]:
    """Results of a `model-index`, from the monitor's figures (`certification.kept.Kept`) by name."""
    known = {name: one for name, one in figures.items() if name in KEPT and one.share is not None}
    metrics = [
        {"type": name, "name": KEPT[name], "value": one.share,
         "args": {"kept": one.kept, "of": one.of, "lower_bound_95": one.low}}
        for name, one in known.items()
    ]  # fmt: skip
    return [{"task": dict(TASK), "dataset": dict(WATCHED), "metrics": metrics}] if metrics else []


def model_index(results: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{"name": MODEL_NAME, "results": results}]


def adapters_below(adapter: Path, most: int = 100) -> list[str]:
    """What an adapter stands on, from the next adapter down to the base model; empty where it cannot be read."""
    try:
        settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        base = str(settings["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [base, *(adapters_below(Path(base), most - 1) if most > 1 else ())]


def loading_note(adapter: Path) -> str | None:
    """Markdown on how to load an adapter on top of adapters; None where PEFT does it right by itself.

    Folders of this machine are not named: a card is made to be published.
    """
    *adapters, base = adapters_below(adapter) or [""]
    if not adapters:
        return None
    name = base if HUB_ID.fullmatch(base) and not Path(base).exists() else "BASE_MODEL"
    steps = [f'model = AutoModelForCausalLM.from_pretrained("{name}")']
    for i in range(len(adapters), 0, -1):
        which = "ADAPTER_BELOW" if len(adapters) == 1 else f"ADAPTER_BELOW_{i}"
        steps.append(f'model = PeftModel.from_pretrained(model, "{which}").merge_and_unload()')
    steps.append('model = PeftModel.from_pretrained(model, "THIS_ADAPTER")')
    code = "\n".join(["from peft import PeftModel", "from transformers import AutoModelForCausalLM", "", *steps])
    return (
        "## Loading it\n\nThis adapter was trained on a model into which another adapter (its alignment) had been "
        "merged. PEFT's `AutoPeftModelForCausalLM` and a plain `PeftModel.from_pretrained` on the base leave that one "
        f"out without an error. Merge it first:\n\n```python\n{code}\n```\n\n"
        "Where it was trained, holdfast finds both by itself:\n\n```python\nfrom holdfast.models.handle import "
        'load_pair\n\nmodel, tokenizer = load_pair("THIS_ADAPTER")\n```'
    )
