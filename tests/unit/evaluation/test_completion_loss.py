"""Loss per completion token: equal to a literal loop over examples and tokens, whatever shares the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from peft import get_peft_model
from scipy import stats
from tests import tiny

from holdfast.core.errors import ConfigError, DataError, NumericalError, ResourceError
from holdfast.data.examples import make_example
from holdfast_lab.evaluation.completion_loss import completion_loss, ratio


def examples(n: int = 7) -> list:
    """Prompts and completions of different lengths; prompts end with a blank, since the tokenizer goes by words."""
    made = []
    for i, row in enumerate(tiny.rows(n, seed=3)):
        more = " ".join(tiny.WORDS[: (5 * i) % 11])
        made.append(make_example(f"{row['prompt']}{more} ", f"{row['completion']} {more}".strip(), f"row {i}"))
    return made


def chat(example) -> tuple[str, str]:
    """What the tiny template renders, split where the reply begins."""
    return f"<|user|> {example.prompt} <|end|> <|assistant|> ", f"{example.completion} <|end|> "


def plain(example) -> tuple[str, str]:
    return example.prompt, f"{example.completion}<eos>"


def literal(model, tokenizer, rendered, max_length=None) -> list[list[float]]:
    """Token losses of every completion: one example at a time, one log-softmax a token."""
    found = []
    with torch.no_grad():
        for prompt, reply in rendered:
            start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            ids = tokenizer(prompt + reply, add_special_tokens=False)["input_ids"][:max_length]
            logits = model(input_ids=torch.tensor([ids])).logits[0].double()
            found.append([-float(torch.log_softmax(logits[t - 1], -1)[ids[t]]) for t in range(start, len(ids))])
    return found


def interval(losses: list[list[float]]) -> tuple[float, float, float]:
    """The ratio's interval, by its formula."""
    sums, counts, n = [sum(x) for x in losses], [len(x) for x in losses], len(losses)
    value = sum(sums) / sum(counts)
    residual = np.array([s - value * t for s, t in zip(sums, counts, strict=True)])
    error = math.sqrt(n) * math.sqrt((residual @ residual) / (n - 1)) / sum(counts)
    half = stats.t(n - 1).ppf(0.975) * error
    return value, value - half, value + half


@pytest.fixture(scope="module")
def model():
    return tiny.model(seed=1).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("template", ["chat", "none"])
def test_it_equals_a_loop_over_examples_and_tokens(model, tokenizer, batch_size, template):
    rendered = [(chat if template == "chat" else plain)(example) for example in examples()]
    losses = literal(model, tokenizer, rendered)
    assert len({len(x) for x in losses}) > 3, "the oracle needs different lengths"
    found = completion_loss(model, tokenizer, examples(), batch_size=batch_size, template=template)
    assert (found.value, found.low, found.high) == pytest.approx(interval(losses), rel=1e-5)
    assert found.n == 7


def test_it_is_no_mean_of_means(model, tokenizer):
    losses = literal(model, tokenizer, map(chat, examples()))
    means = float(np.mean([np.mean(x) for x in losses]))
    assert abs(completion_loss(model, tokenizer, examples()).value - means) > 1e-3


def test_tokens_beyond_the_maximum_do_not_count(model, tokenizer):
    prompts = [len(tokenizer(chat(example)[0])["input_ids"]) for example in examples()]
    shortest = max(prompts) + 2
    whole, cut = (literal(model, tokenizer, map(chat, examples()), length) for length in (None, shortest))
    assert sum(map(len, cut)) < sum(map(len, whole))
    found = completion_loss(model, tokenizer, examples(), max_length=shortest)
    assert found.value == pytest.approx(interval(cut)[0], rel=1e-5)


def test_an_adapter_counts(tokenizer):
    adapted = get_peft_model(tiny.model(seed=1), tiny.lora(dropout=0.5))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    found = completion_loss(adapted, tokenizer, examples())
    with adapted.disable_adapter():
        off = completion_loss(adapted, tokenizer, examples())
    merged = adapted.eval().merge_and_unload()
    expected = interval(literal(merged, tokenizer, map(chat, examples())))[0]
    base = interval(literal(tiny.model(seed=1).eval(), tokenizer, map(chat, examples())))[0]
    assert (found.value, off.value) == pytest.approx((expected, base), rel=1e-5)
    assert abs(expected - base) > 1e-3


def test_dropout_is_off_and_every_mode_is_put_back(tokenizer):
    model = get_peft_model(tiny.model(seed=1), tiny.lora(dropout=0.5)).train()
    model.base_model.model.model.layers[0].eval()
    before = [part.training for part in model.modules()]
    assert len(set(before)) == 2
    first, second = (completion_loss(model, tokenizer, examples()) for _ in range(2))
    assert first == second
    assert [part.training for part in model.modules()] == before
    assert not any(parameter.grad is not None for parameter in model.parameters())


@contextmanager
def narrow(model, rows: int, error: Exception) -> Iterator[list[int]]:
    """A model that holds a few rows at a time; more run out of memory. Gives the rows of every forward."""
    seen: list[int] = []

    def look(_module, _args, kwargs) -> None:
        seen.append(len(kwargs["input_ids"]))
        if seen[-1] > rows:
            raise error

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu"])
def test_a_batch_that_does_not_fit_is_halved(model, tokenizer, error):
    with narrow(model, 2, error) as seen:
        found = completion_loss(model, tokenizer, examples(), batch_size=8)
    assert seen == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    assert found.value == pytest.approx(completion_loss(model, tokenizer, examples()).value, rel=1e-6)


def test_a_single_example_that_does_not_fit_is_refused(model, tokenizer):
    refused = pytest.raises(ResourceError, match=r"a single example of \d+ tokens does not fit in memory")
    with narrow(model, 0, OUT_OF_MEMORY[0]), refused:
        completion_loss(model, tokenizer, examples())


def test_another_error_passes_through(model, tokenizer):
    with narrow(model, 0, RuntimeError("a bug")), pytest.raises(RuntimeError, match="a bug"):
        completion_loss(model, tokenizer, examples())


def test_a_loss_that_is_not_finite_is_refused(tokenizer):
    broken = tiny.model(seed=1)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NumericalError, match="the loss of 7 of 7 examples is not finite"):
        completion_loss(broken, tokenizer, examples())


def test_nothing_to_score_is_refused(model, tokenizer):
    with pytest.raises(DataError, match="no examples"):
        completion_loss(model, tokenizer, [])
    with pytest.raises(DataError, match="7 of 7 task examples have no completion token to score"):
        completion_loss(model, tokenizer, examples(), max_length=4)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        completion_loss(model, tokenizer, examples(), batch_size=0)


def test_one_example_has_no_interval(model, tokenizer):
    found = completion_loss(model, tokenizer, examples()[:1])
    assert (found.low, found.high, found.n) == (None, None, 1)


def test_a_tokenizer_without_padding_will_do(model):
    found = completion_loss(model, tiny.tokenizer(pad=False), examples())
    assert found.value == pytest.approx(completion_loss(model, tiny.tokenizer(), examples()).value, rel=1e-6)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Examples of random lengths, long ones with another loss per token: 95 % of intervals hold the true ratio."""
    draw = np.random.default_rng(0)
    hits, trials, n = 0, 2000, 60
    for _ in range(trials):
        counts = draw.integers(1, 20, n).astype(float)
        level = draw.normal(2.0, 0.5, n) - 0.05 * counts  # E[S | T] = (2 - 0.05 T) T
        found = ratio(level * counts, counts)
        truth = 2.0 - 0.05 * (np.arange(1, 20) ** 2).mean() / np.arange(1, 20).mean()
        hits += found.low <= truth <= found.high
    assert stats.binomtest(hits, trials, 0.95).pvalue > 1e-3
