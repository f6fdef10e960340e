"""Recorded passes give what unrecorded ones give, are made anew where they must be, and dropped where they fail."""

from __future__ import annotations

import logging

import pytest
import torch
from tests import hybrid
from tests import tiny as words
from tests.unit.fused.comparing import adapted, apart, encoded, packed, passes
from tests.unit.fused.simulated_cuda import Tape

from holdfast.fused import recorded
from holdfast.fused.packed_rows import encoded_rows, lay_out, sizes
from holdfast.fused.recorded import RecordedPasses, rounded

QKV = ("q_proj", "k_proj", "v_proj")


def model(kind="llama", dropout=0.0):
    base = words.model() if kind == "llama" else hybrid.model()
    return adapted(base, QKV if kind == "llama" else hybrid.ADAPTED, lora_dropout=dropout).train()


def batch(*lengths, seed=0):
    return [encoded_rows(encoded(lengths[:2], seed=seed)), encoded_rows(encoded(lengths[2:], seed=seed + 1))]


def both(made):
    eager = passes(made)
    return eager, RecordedPasses(eager.body)


def same(run, eager, groups):
    (h, g), (h_0, g_0) = packed(run, groups), packed(eager, groups)
    n = len(h_0)
    return apart(h[:n], h_0) < 1e-6 and all(apart(a, b) < 1e-5 for a, b in zip(g, g_0, strict=True))


@pytest.fixture(autouse=True)
def shorter_seeds(monkeypatch):
    """A recording's hidden states are filled up; the same gradient for the tokens of both, none for the filling."""
    from tests.unit.fused import comparing

    def seeds(tokens, width):
        found = torch.zeros(tokens, width)
        found[: min(tokens, 12)] = torch.randn(12, width, generator=torch.Generator().manual_seed(7))[:tokens]
        return found

    monkeypatch.setattr(comparing, "seeds", seeds)


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_recording_is_the_pass_for_every_batch_of_its_size(cuda, kind, checkpointing):
    made = model(kind)
    if checkpointing:
        made.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    eager, run = both(made)
    for k, lengths in enumerate(((5, 9, 7), (11, 3, 8), (4, 4, 12))):
        assert same(run, eager, batch(*lengths, seed=k))
        for p in eager.body.adapter.parameters:  # an optimizer's step, in place
            p.data.mul_(1.1)
    assert run.recording
    assert len(run._recordings) == 1
    groups = batch(5, 9, 7)
    for adapters in (True, False):
        found = run.states(groups, adapters=adapters)
        assert apart(found[:21], eager.states(groups, adapters=adapters)) < 1e-6
    assert {kind for _, kind in run._recordings} == {"gradients", "states", "reference"}


def test_a_group_may_be_empty_and_a_batch_of_another_size_is_another_recording(cuda):
    eager, run = both(model())
    assert same(run, eager, [batch(5, 9)[0], []])
    assert same(run, eager, batch(40, 50, 44, 30))
    assert len(run._recordings) == 2
    assert same(run, eager, [batch(6, 8)[0], []])
    assert len(run._recordings) == 2


def test_leaves_that_moved_make_all_recordings_anew(cuda):
    eager, run = both(model())
    assert same(run, eager, batch(5, 9, 7))
    first = next(iter(run._recordings.values()))
    run.body.adapter.parameters[1].data = run.body.adapter.parameters[1].data.clone() * 2
    assert same(run, eager, batch(5, 9, 7))
    assert next(iter(run._recordings.values())) is not first
    assert len(run._recordings) == 1
    assert first.forward.replays == 2  # its check and its one pass
    assert len(cuda.pools) == 2  # torch refuses a pool that no recording uses any more


def test_leaves_that_moved_before_a_pass_too_large_to_record_make_recordings_anew(cuda, monkeypatch):
    eager, run = both(model())
    assert same(run, eager, batch(5, 9, 7))
    run.body.adapter.parameters[1].data = run.body.adapter.parameters[1].data.clone() * 2
    monkeypatch.setattr(recorded, "MAX_TOKENS", 64)
    assert same(run, eager, batch(40, 50, 44))
    assert same(run, eager, batch(5, 9, 7))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("an operation that cannot be recorded\nsecond line"), "an operation that cannot be recorded"),
        (torch.OutOfMemoryError("CUDA out of memory"), "not enough memory for a recording"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory for a recording"),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_recording_that_fails_ends_recording_and_the_step_goes_on(cuda, caplog, error, said, after):
    """At the forward (0), the backward (1), or the first one of another size (2)."""
    made = model()
    eager, run = both(made)
    cuda.fails, cuda.allowed = error, after
    with caplog.at_level(logging.WARNING, "holdfast"):
        if after == 2:
            assert same(run, eager, batch(5, 9, 7))
            assert run.recording
        assert same(run, eager, batch(40, 50, 44))
    assert [r.getMessage() for r in caplog.records] == [f"the step runs without CUDA graphs: {said}"]
    assert not run.recording
    assert not run._recordings
    assert run._gradients == []
    assert run._expected is None
    assert cuda.emptied
    assert all("forward" not in m.__dict__ for m in made.modules() if hasattr(m, "lora_A"))
    count = len(cuda.tapes)
    assert same(run, eager, batch(5, 9, 7))
    assert len(cuda.tapes) == count  # it is not tried again


def look(_module, _arguments, out):
    return out * (1.0 if out.sum().item() else 2.0)


def look_back(_module, _arguments, out):
    if out.requires_grad:
        out.register_hook(lambda g: g + 0.0 * g.sum().item())


@pytest.mark.parametrize(("hook", "pools"), [(look, [0]), (look_back, [1])], ids=["forward", "backward"])
def test_a_model_that_looks_at_a_value_runs_unrecorded(cuda, caplog, hook, pools):
    """And what torch leaves of a capture that failed is put away; of the pool's users only a whole recording stays."""
    made = model()
    made.get_base_model().model.norm.register_forward_hook(hook)
    eager, run = both(made)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert same(run, eager, batch(5, 9, 7))
    assert "without CUDA graphs: operation not permitted when stream is capturing" in caplog.text
    assert "more" not in caplog.records[0].getMessage()
    assert (cuda.stream, cuda.underway, cuda.generator.capturing) == ("default", None, False)
    assert list(cuda.pools.values()) == pools


def test_a_recording_that_gives_other_numbers_is_refused(cuda, caplog, monkeypatch):
    monkeypatch.setattr(Tape, "spoilt", 0.5)
    eager, run = both(model())
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert same(run, eager, batch(5, 9, 7))
    assert "a recording gives other numbers than the pass it was made of" in caplog.text
    assert not run.recording


def test_a_recording_whose_gradients_alone_are_nan_is_refused(cuda, caplog, monkeypatch):
    inner = Tape.replay

    def replay(tape):
        inner(tape)
        if tape is cuda.tapes[1]:  # the first recording's backward
            for group in run._gradients:
                group[0].fill_(float("nan"))

    monkeypatch.setattr(Tape, "replay", replay)
    eager, run = both(model())
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert same(run, eager, batch(5, 9, 7))
    assert "a recording gives other numbers than the pass it was made of" in caplog.text


def test_there_are_only_so_many_recordings_and_none_of_large_batches(cuda, monkeypatch):
    monkeypatch.setattr(recorded, "MAX_RECORDINGS", 1)
    eager, run = both(model())
    assert same(run, eager, batch(5, 9, 7))
    assert same(run, eager, batch(40, 50, 44))
    assert run.recording
    assert len(run._recordings) == 1
    monkeypatch.setattr(recorded, "MAX_RECORDINGS", 2)
    first = list(run._recordings)
    assert same(run, eager, batch(5, 9, 7))
    assert same(run, eager, batch(40, 50, 44))  # used again, so it is the other that goes
    assert same(run, eager, batch(90, 90, 90))
    assert first[0] in run._recordings
    assert len(run._recordings) == 2
    monkeypatch.setattr(recorded, "MAX_TOKENS", 63)
    replays = [tape.replays for tape in cuda.tapes]
    assert same(run, eager, batch(5, 9, 7))
    assert [tape.replays for tape in cuda.tapes] == replays


def test_making_a_recording_draws_nothing_and_replays_draw_anew(cuda):
    _, run = both(model(dropout=0.5))
    state = torch.random.get_rng_state()
    made = run._made(batch(5, 9, 7), rounded(batch(5, 9, 7), padded=True), "gradients")
    assert made is not None
    assert torch.equal(torch.random.get_rng_state(), state)
    first, second = packed(run, batch(5, 9, 7)), packed(run, batch(5, 9, 7))
    assert not torch.equal(torch.random.get_rng_state(), state)
    assert apart(first[1][0], second[1][0]) > 0.05
    assert apart(first[1][1], second[1][1]) < 1e-6
    state = torch.random.get_rng_state()
    run.states(batch(5, 9, 7))  # measures, without dropout
    assert torch.equal(torch.random.get_rng_state(), state)


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pads", [False, True])
def test_a_batch_is_filled_up_by_little_and_to_few_sizes(pads):
    found = set()
    for n in range(1, 200):
        groups = [[((1,) * (3 + n % 17), (1,) * (3 + n % 17))] * n, []]
        need, fill = sizes(groups), rounded(groups, padded=pads)
        found.add(fill)
        assert fill.rows % 4 == 0
        assert 0 <= fill.rows - n < 4
        assert need.tokens <= fill.tokens <= max(need.tokens * (5 / 4 if pads else 9 / 8), need.tokens + 63)
        layout = lay_out(groups, fill)  # fits
        assert layout.input_ids.shape[1] == fill.tokens
        if pads:
            for width, needed in zip(fill.widths, sizes(groups, rows=fill.rows).widths, strict=True):
                assert needed <= width <= max(needed * 5 / 4, needed + 63)
        else:
            assert fill.widths == (512,)
    assert len({(f.tokens, f.widths) for f in found}) < 40


@pytest.mark.parametrize("pads", [False, True])
def test_the_bound_on_the_rows_holds_for_the_filling_row_too(pads):
    """A kernel that is told a smaller bound leaves the tokens beyond it unwritten, and what lay there may be NaN."""
    rows = [((1,) * 10, (1,) * 10)] * 820  # 8200 tokens are filled up to 9216 or 10240
    fill = rounded([rows], padded=pads)
    assert fill.tokens - 8200 > max(512, *fill.widths)
    layout = lay_out([rows], fill)
    assert int(layout.boundaries.diff().max()) == fill.tokens - 8200 <= layout.longest
    assert int(layout.position_ids.max()) == 9  # and needs no position that a short row does not
