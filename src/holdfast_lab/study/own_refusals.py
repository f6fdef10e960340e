"""The aligned model's own refusals as the safety set of a study.

A constraint protects what its prompts are like. Where the alignment pairs ask other things than the attack does, the
model is asked the attack's kind of prompts (the `asked` role, which no other role shares), and its own refusals are
what must stay likely.
"""

import json
from pathlib import Path
from typing import Any

from holdfast.core.errors import DataError
from holdfast.core.files import write_text
from holdfast.core.hashing import sha256_text
from holdfast.data.examples import prompt_text
from holdfast.data.templates import use_template
from holdfast.models.content import content_of
from holdfast.models.unmerged import load_unmerged
from holdfast_lab.evaluation.evaluate import Decoding, Questions, answer
from holdfast_lab.evaluation.refusal_rules_1 import is_refusal
from holdfast_lab.protocol.roles import RoleSettings, draw_roles
from holdfast_lab.study.protocol import Protocol

TOKENS = 128
FEWEST = 100


def kept_file(alignment: Path) -> Path:
    """Where an alignment's kept replies lie."""
    return alignment / "kept" / "safety.jsonl"


def keep_replies(protocol: Protocol, adapter: Path, alignment: Path) -> dict[str, Any]:
    """Ask the aligned model, keep its refusals that came to an end within 128 tokens, and say how many there are."""
    roles = draw_roles(RoleSettings(**protocol.roles.model_dump()))
    questions = Questions(harm=roles.asked)
    decoding = Decoding(
        harm_tokens=TOKENS, engine=protocol.evaluation.engine, batch_size=protocol.evaluation.batch_size
    )
    model, tokenizer = load_unmerged(adapter, dtype=protocol.dtype)
    use_template(tokenizer, protocol.template)
    replies = answer(
        model, tokenizer, questions, decoding,
        folder=kept_file(alignment).parent, model_sha256=content_of(adapter).sha256, template=protocol.template,
    )["harm"] if roles.asked else []  # fmt: skip
    rows = [
        {"prompt": prompt_text(example), "completion": reply.text, "category": example.category}
        for example, reply in zip(roles.asked, replies, strict=True)
        if not reply.truncated and is_refusal(reply.text)
    ]
    fewest = max(1, min(FEWEST, protocol.roles.asked))
    if len(rows) < fewest:
        raise DataError(
            f"the aligned model refused {len(rows)} of {len(replies)} prompts that ask for harm, expected at least "
            f"{fewest}: there is nothing to keep",
            remedy="align longer (protocol.align.train), ask more (protocol.roles.asked), or set protocol.keep: pairs",
        )
    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    write_text(kept_file(alignment), text, mode=0o600)
    return {"asked": len(replies), "kept": len(rows), "kept_sha256": sha256_text(text)}
