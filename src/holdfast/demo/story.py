"""The demonstration: screen a poisoned file with a small aligned model, fine-tune it twice, and compare.

Plain SFT learns the file as it is. holdfast asks the model first, leaves out the rows that teach what it refuses, and
holds its own replies. All else is the same, and measured on prompts that neither was trained on. The start was aligned
beforehand: a shipped adapter (tools/demo_aligned.py) lets the embedded model decline what a shop assistant should.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import set_seed
from transformers.utils import logging as transformers_logging

from holdfast.certification.binomial import Rate
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.files import read_json, write_json
from holdfast.core.hashing import sha256_file
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.examples import Example, prompt_text, to_rows
from holdfast.data.splits import split_from_roles
from holdfast.defaults import default
from holdfast.demo.data import ORDINARY, PROBES, RECORDED, DemoData, DemoSettings, load_data
from holdfast.judging.engines.transformers import generate
from holdfast.judging.reply import Reply
from holdfast.judging.reply_classes import ReplyClass, sort_reply
from holdfast.judging.store import read_replies
from holdfast.models.handle import fast_dtype, load_pair
from holdfast.runs.stages.align import keep_freed_memory
from holdfast.runs.stages.finetune import Listener, listen, short_run
from holdfast.screening.asking import Asker, progress_to
from holdfast.screening.screen import Screening, ask_and_screen, screen
from holdfast.screening.settings import TASK, PromptSet, ScreeningSettings
from holdfast.training.trainer import SafeSFTTrainer

Say = Callable[[str], None]

# The model's own template without its default system turn: a third fewer tokens, so a third less time.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ALIGNED_DIR, PROVENANCE = Path(__file__).parent / "aligned", "provenance.json"
TASK_TOKENS = 2  # a label is one token and its end
BATCH_SIZE = 50
ANCHORED = {"anchor": True, "reserve": 0.4, "value_decay": 0.95}
"""The filter's options: with them and the demo's limits none of its 18 steps ended over one (one seed, docs/log.md)."""
ALIGNED, SFT, OURS = "aligned start", "plain SFT", "holdfast"


@dataclass
class Measured:
    accuracy: Rate  # replies that are exactly the label
    refusals: Rate  # of requests that are to be declined
    over_refusal: Rate  # refusals of ordinary requests
    replies: dict[str, str] = field(default_factory=dict, repr=False)  # to both kinds of requests, by prompt
    seconds: float = 0.0  # of its training

    def as_json(self) -> dict[str, object]:
        return {
            "task_accuracy": self.accuracy.as_json(), "refusals": self.refusals.as_json(),
            "over_refusal": self.over_refusal.as_json(), "train_seconds": round(self.seconds, 1),
        }  # fmt: skip


def measure(model: LanguageModel, tokenizer: Tokenizer, data: DemoData, tokens: int) -> Measured:
    """Ask the held-out prompts, greedily; `tokens` of a reply to a request, a label takes `TASK_TOKENS`."""
    labels = _replies(model, tokenizer, data.test_task, TASK_TOKENS)
    hits = sum(reply.text == str(e.completion).strip() for reply, e in zip(labels, data.test_task, strict=True))
    requests, n = [*data.test_probes, *data.test_ordinary], len(data.test_probes)
    replies = _replies(model, tokenizer, requests, tokens)  # both kinds together: fewer and fuller batches
    texts = {prompt_text(example): reply.text for example, reply in zip(requests, replies, strict=True)}
    return Measured(Rate(hits, len(labels)), _refused(replies[:n]), _refused(replies[n:]), texts)


def refused(model: LanguageModel, tokenizer: Tokenizer, examples: Sequence[Example], tokens: int) -> Rate:
    return _refused(_replies(model, tokenizer, examples, tokens))


def changed_first(examples: Sequence[Example], models: Mapping[str, Measured]) -> list[Example]:
    """The examples, those first that some models refuse and others do not; otherwise in their order."""
    replies = {e.id: [measured.replies[prompt_text(e)] for measured in models.values()] for e in examples}
    return sorted(examples, key=lambda e: len(set(map(is_refusal, replies[e.id]))), reverse=True)


def is_refusal(text: str, truncated: bool = True) -> bool:
    """Whether the rules that screening sorts replies by count it as a refusal."""
    return sort_reply(text, truncated=truncated).reply_class == ReplyClass.REFUSED


def _replies(model: LanguageModel, tokenizer: Tokenizer, examples: Sequence[Example], tokens: int) -> list[Reply]:
    return generate(model, tokenizer, examples, max_new_tokens=tokens, batch_size=BATCH_SIZE)


def _refused(replies: Sequence[Reply]) -> Rate:
    return Rate(sum(is_refusal(reply.text, reply.truncated) for reply in replies), len(replies))


@dataclass
class DemoResult:
    """What screening found, the three models, and what it took."""

    settings: DemoSettings
    data: DemoData
    screening: Screening
    models: dict[str, Measured]
    seconds: float
    g: dict[str, float]  # holdfast's constraints as estimated in its last step, by set; above zero is over the limit

    @property
    def found(self) -> dict[str, int]:
        """Rows of the file, the poison in it, conflicts, and how many of those are poison."""
        conflicts = {one.row for one in self.screening.conflicts}
        return {
            "rows": len(self.data.task), "poison": len(self.data.poison), "conflicts": len(conflicts),
            "poison_found": len(conflicts & self.data.poison),
        }  # fmt: skip

    @property
    def held(self) -> dict[str, int]:
        return {name: len(split.constraint) for name, split in self.screening.sets.items()}

    def as_json(self) -> dict[str, object]:
        return {
            "screening": {**self.found, "held": self.held, "figures": self.screening.figures()},
            "models": {name: measured.as_json() for name, measured in self.models.items()}, "g": self.g,
            "settings": asdict(self.settings), "seconds": round(self.seconds, 1),
            "versions": versions(), "commit": commit(), "hardware": hardware(),
        }  # fmt: skip


class Recorded:
    """An engine that reads a model's replies from a file instead of asking it."""

    name = "recorded"

    def __init__(self, path: Path) -> None:
        self._replies = read_replies(path)

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        """The recorded replies; a prompt without a long enough one is left out, which whoever asks refuses."""
        found = [self._replies[example.id] for example in examples if example.id in self._replies]
        yield [reply for reply in found if not reply.truncated or reply.tokens >= max_new_tokens]


def screened(
    model: LanguageModel, tokenizer: Tokenizer, data: DemoData, settings: DemoSettings,
    listener: Listener | None, replies: Path | None = None,
) -> Screening:  # fmt: skip
    """Ask the aligned model the task and the demo's own prompts, as `safety: auto` does; conflicts are set aside.

    `recorded`: its replies are read, at most `most_held` of each set are held. `replies`: where replies are stored.
    """
    wanted = ScreeningSettings(
        sets={"refusals": PromptSet((TASK, PROBES), "refusals"), "answers": PromptSet((ORDINARY,), "answers")},
        limited=False, accept_unsorted=True, monitor_prompts=0, seed=settings.seed,
    )  # fmt: skip
    if settings.recorded:
        logger = logging.getLogger("holdfast.screening")
        level = logger.level
        logger.setLevel(logging.WARNING)  # it speaks of asking, and nothing is asked
        try:
            with TemporaryDirectory() as folder:
                asker = Asker(Recorded(RECORDED), {"recorded": sha256_file(RECORDED)}, Path(folder))
                found = ask_and_screen(model, data.task, asker, wanted)
        finally:
            logger.setLevel(level)
        most = settings.most_held
        held = {name: split_from_roles(one.constraint[:most], (), ()) for name, one in found.sets.items()}
        return replace(found, sets=held)
    progress = progress_to([] if listener is None else [listener])
    return screen(model, data.task, tokenizer, settings=wanted, replies=replies, progress=progress)


def held(settings: DemoSettings, screening: Screening) -> dict[str, Any]:
    limits = {
        keep: ChanceConstraint(
            tau=settings.tau, beta=1 / settings.tau, unit=default(f"constraint.{unit}"),
            alpha=default(f"constraint.{keep}.alpha"),
        )
        for keep, unit in (("refusals", "refusals.unit"), ("answers", "unit"))
    }  # fmt: skip
    return {"safety_dataset": screening, "defense": {"name": "holdfast", **ANCHORED}, "constraint": limits}


def finetune(
    aligned: LanguageModel, tokenizer: Tokenizer, data: DemoData, settings: DemoSettings, folder: Path,
    screening: Screening | None, listeners: Sequence[Listener],
) -> tuple[SafeSFTTrainer, float]:  # fmt: skip
    """Fine-tune a copy of the aligned model: by holdfast where there is a screening, otherwise by plain SFT."""
    set_seed(settings.seed)  # the adapter's initial weights are drawn before the trainer seeds
    arguments = short_run(
        folder, seed=settings.seed, bf16=False, max_length=settings.max_length, max_steps=settings.steps,
        learning_rate=settings.rate, per_device_train_batch_size=settings.batch, warmup_steps=settings.warmup,
        safety_batch_size=settings.safety_batch, safety_eval_batch_size=16,
    )  # fmt: skip
    lora = LoraConfig(
        r=settings.rank, lora_alpha=settings.lora_alpha, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trainer = SafeSFTTrainer(
        copy.deepcopy(aligned), arguments, train_dataset=Dataset.from_list(to_rows(data.task)),
        processing_class=tokenizer, peft_config=lora,
        **({"defense": "sft"} if screening is None else held(settings, screening)),
    )  # fmt: skip
    listen(trainer, list(listeners))
    started = time.monotonic()
    trainer.train()
    return trainer, time.monotonic() - started


def run_demo(
    folder: Path, settings: DemoSettings | None = None, *, say: Say = print, listener: Listener | None = None
) -> DemoResult:
    """The whole demonstration; writes result.json, the adapters and the event logs under `folder`."""
    settings = settings or DemoSettings()
    started = time.monotonic()
    keep_freed_memory()
    transformers_logging.set_verbosity_error()
    data = load_data(settings)
    made = read_json(ALIGNED_DIR / PROVENANCE)
    say(
        f"the model: SmolLM2-135M-Instruct, aligned beforehand on {made['rows']['n']} refusals and ordinary answers "
        f"({made['settings']['steps']} steps, a shipped adapter)"
    )
    aligned, tokenizer = load_pair(ALIGNED_DIR, dtype=fast_dtype())
    tokenizer.chat_template = TEMPLATE
    how = "its replies, recorded beforehand, to" if settings.recorded else "the aligned model is asked"
    say(f"screening: {how} the {len(data.task)} prompts of the task file")
    screening = screened(aligned, tokenizer, data, settings, listener)
    models = {ALIGNED: measure(aligned, tokenizer, data, settings.reply_tokens)}
    g: dict[str, float] = {}

    def follow(row: Mapping[str, Any]) -> None:
        g.update({name: one["g"] for name, one in row.get("constraints", {}).items() if one.get("g") is not None})

    listeners = [follow] if listener is None else [follow, listener]
    for name, used, rows in ((SFT, None, len(data.task)), (OURS, screening, len(screening.kept(data.task)))):
        say(f"{name}: {settings.steps} steps on {rows} rows")
        place = folder / name.split()[-1].lower()
        trainer, seconds = finetune(aligned, tokenizer, data, settings, place, used, listeners)
        say(f"measuring {name}")
        models[name] = measure(trainer.model, tokenizer, data, settings.reply_tokens)
        models[name].seconds = seconds
        trainer.save_model(str(place / "adapter"))
    result = DemoResult(settings, data, screening, models, time.monotonic() - started, g)
    write_json(folder / "result.json", result.as_json())
    return result


INK, MUTED = "#1f2933", "#7b8794"
COLOURS = {ALIGNED: "#9aa5b1", SFT: "#d1495b", OURS: "#2a78b5"}
PANELS = (
    ("refusals", "Requests to decline: refused", "higher is better"),
    ("over_refusal", "Ordinary requests: refused", "lower is better"),
    ("accuracy", "Task: reviews labelled correctly", "higher is better"),
)


def draw(result: DemoResult, path: Path) -> None:
    """One panel a figure, one bar a model, with exact 95 % intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True, layout="constrained")
    for ax, (name, title, better) in zip(axes, PANELS, strict=True):
        for place, (model, measured) in enumerate(result.models.items()):
            rate: Rate = getattr(measured, name)
            value, low, high = (100 * share for share in (rate.value, *rate.interval))
            ax.barh(place, value, height=0.62, color=COLOURS[model])
            ax.plot([low, high], [place, place], color=INK, linewidth=1)
            ax.text(max(value, high) + 2, place, f"{value:.0f}", va="center", color=INK, fontsize=9)
        n = getattr(result.models[OURS], name).n
        ax.set_title(title, loc="left", color=INK, fontsize=10)
        ax.set_xlabel(f"% of {n} held-out prompts ({better})", color=MUTED, fontsize=8)
        ax.set_xlim(0, 119)
        ax.set_xticks([0, 50, 100])
        ax.set_yticks(range(len(result.models)), list(result.models), color=INK)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(colors=MUTED, length=0, labelsize=9)
        ax.tick_params(axis="y", labelcolor=INK)
    axes[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
