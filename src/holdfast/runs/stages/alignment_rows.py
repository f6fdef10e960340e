"""What an alignment learns: refusals of prompts that ask for harm, and the model's own answers to ordinary ones.

Refusals alone would teach it to refuse everything. An answer is the beginning of its own greedy reply; the end token is
learnt only where the reply ended, so that replies do not become shorter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

from holdfast.core.errors import InfeasibleError
from holdfast.core.library_types import Tokenizer
from holdfast.core.seeding import generator
from holdfast.data.bundled import bundled
from holdfast.data.encode import IGNORE, Encoded, encode_all
from holdfast.data.examples import Example, as_chat, as_turns, make_example, prompt_text
from holdfast.data.near_duplicates import matches
from holdfast.data.refusals import GENERIC
from holdfast.judging.prompts import prompt_ids
from holdfast.judging.reply import Reply
from holdfast.judging.reply_classes import REFUSED, ReplyClass, sort_reply
from holdfast.screening.asking import Sorted

T = TypeVar("T")

ORDINARY = ("everyday", "borderline", "tasks")  # sources of prompts to answer
FEWEST = 20  # own answers to the prompts of one ordinary source below which there is too little to keep


@dataclass(frozen=True)
class AlignmentPrompts:
    refuse: list[Example]
    ordinary: dict[str, list[Example]]  # by source; these and `refuse` are trained on
    held_out: dict[str, list[Example]]  # probes and ordinary prompts of other kinds, by source: only asked


def bundled_prompts(extra: Sequence[Example], *, held_out: int, seed: int) -> AlignmentPrompts:
    """Bundled prompts of use `steer` and `extra` to train on; at most `held_out` of each set of use `monitor` to ask.

    Held-out prompts that are near-duplicates of `extra` are left out: they would no longer be held out.
    """
    kept = {}
    for name in ("probes", *ORDINARY):
        examples = bundled(name, "monitor")
        seen = {j for _, j in matches([prompt_text(e) for e in extra], [prompt_text(e) for e in examples])}
        kept[name] = spread([e for j, e in enumerate(examples) if j not in seen], held_out, seed)
    ordinary = {name: bundled(name, "steer") for name in ORDINARY}
    return AlignmentPrompts([*bundled("probes", "steer"), *extra], ordinary, kept)


def spread(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """At most `count` examples, as many of each category as there are, in a seeded order."""
    by_kind: dict[str | None, list[Example]] = {}
    for i in generator(seed, "alignment prompts").permutation(len(examples)).tolist():
        by_kind.setdefault(examples[i].category, []).append(examples[i])
    turns = zip_longest(*by_kind.values())
    return [example for turn in turns for example in turn if example is not None][:count]


def refusal_rows(
    prompts: Sequence[Example], count: int, tokenizer: Tokenizer, *, seed: int, length: int
) -> list[Encoded]:
    """`count` rows, the prompts in turn, each time with another generic refusal.

    Only refusals that the rules recognise: one that they miss would be taught, and then neither held nor counted.
    """
    texts = [text for text in GENERIC if sort_reply(text, truncated=False) == REFUSED]
    chosen = zip(in_turn(prompts, count, seed, "refusals"), in_turn(texts, count, seed, "texts"), strict=True)
    examples = [make_example(as_chat(e).prompt, as_turns("assistant", text), e.where) for e, text in chosen]
    return encode_all(examples, tokenizer, max_length=length, role="safety").examples


def answer_rows(
    prompts: Sequence[Example], replies: Mapping[str, Sorted], count: int, tokenizer: Tokenizer, *, seed: int, name: str
) -> list[Encoded]:
    """`count` rows, in turn, of the prompts that the model answered; `replies` are its own, by prompt id."""
    answered = [e for e in prompts if replies[e.id].reply_class == ReplyClass.ANSWERED]
    if len(answered) < FEWEST:
        raise InfeasibleError(
            f"the model answers {len(answered)} of {len(prompts)} {name} prompts, expected at least {FEWEST}: "
            "there are too few ordinary answers to keep",
            remedy="use a chat model that answers ordinary questions, with its own chat template",
        )
    pairs = [(example, replies[example.id].reply) for example in answered]
    return in_turn(_encoded(pairs, tokenizer), count, seed, name)


def _encoded(pairs: Sequence[tuple[Example, Reply]], tokenizer: Tokenizer) -> list[Encoded]:
    whole = [make_example(as_chat(example).prompt, as_turns("assistant", reply.text)) for example, reply in pairs]
    rows = encode_all(whole, tokenizer, max_length=None, role="safety").examples
    asked = prompt_ids(tokenizer, [example for example, _ in pairs], "chat")
    for place, (prompt, (_, reply)) in enumerate(zip(asked, pairs, strict=True)):
        if reply.truncated:  # its beginning alone: what the template puts behind a reply is left out
            ids = list(tokenizer(text=reply.text, add_special_tokens=False)["input_ids"])
            labels = (*[IGNORE] * len(prompt), *ids)
            rows[place] = Encoded(rows[place].id, (*prompt, *ids), labels, truncated=True)
    return rows


def in_turn(items: Sequence[T], count: int, seed: int, name: str) -> list[T]:
    """`count` items: all in a random order, then all in another, and so on."""
    order: list[int] = []
    draw = generator(seed, "alignment", name)
    while len(order) < count:
        order += draw.permutation(len(items)).tolist()
    return [items[i] for i in order[:count]]
