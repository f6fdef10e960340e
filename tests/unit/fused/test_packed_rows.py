"""Packed layouts and scored tokens against the padded computation written out, on any groups of rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.fused.body import flat, padded
from holdfast.fused.packed_rows import CURRENT, Sizes, lay_out, padded_rows, scored, sizes
from holdfast.fused.recorded import rounded

row = st.lists(st.tuples(st.integers(1, 63), st.booleans()), min_size=1, max_size=12)
groups_of_rows = st.lists(st.lists(row, max_size=4), min_size=1, max_size=3).filter(any)


def rows_of(drawn):
    return [[(tuple(t for t, _ in one), tuple(t if on else -100 for t, on in one)) for one in group] for group in drawn]


def tokens(groups):
    return [
        (g, r, p, t) for g, group in enumerate(groups) for r, (ids, _) in enumerate(group) for p, t in enumerate(ids)
    ]


@settings(max_examples=60, deadline=None)
@given(drawn=groups_of_rows, filled=st.booleans(), pads=st.booleans())
def test_a_layout_keeps_every_token_with_its_place_and_group(drawn, filled, pads):
    groups = rows_of(drawn)
    fill = rounded(groups, padded=pads) if filled else None
    layout, all_tokens = lay_out(groups, fill), tokens(groups)
    n, total = len(all_tokens), layout.input_ids.shape[1]
    assert total == (fill.tokens if filled else n)
    assert layout.input_ids[0, :n].tolist() == [t for *_, t in all_tokens]
    assert layout.position_ids[0].tolist() == [p for _, _, p, _ in all_tokens] + [0] * (total - n)
    for k, (g, *_) in enumerate(all_tokens):
        assert layout.membership[k].tolist() == [float(i == g) for i in range(len(groups))]
    assert not layout.membership[n:].any()
    lengths = [len(ids) for group in groups for ids, _ in group]
    boundaries = layout.boundaries.tolist()
    assert layout.boundaries.dtype == torch.int32
    assert np.diff(boundaries)[: len(lengths)].tolist() == lengths
    assert boundaries[-1] == total
    assert (np.diff(boundaries) >= 0).all()
    # A kernel over boundaries is told the longest, also in a hybrid, whose other mixers are padded.
    assert max(np.diff(boundaries)) <= layout.longest


@settings(max_examples=60, deadline=None)
@given(drawn=groups_of_rows, filled=st.booleans())
def test_padding_and_packing_are_inverse_and_rows_stay_apart(drawn, filled):
    groups = rows_of(drawn)
    layout = lay_out(groups, rounded(groups, padded=True) if filled else None)
    n = len(tokens(groups))
    row_of = np.repeat(np.arange(sum(map(len, groups))), [len(ids) for group in groups for ids, _ in group])
    total = layout.input_ids.shape[1]
    x = torch.stack([torch.arange(total), torch.tensor([*row_of, *[-1] * (total - n)])], 1).double()
    segments = padded(x, layout)
    assert [tuple(s.shape[:2]) for s in segments] == layout.segments
    assert torch.equal(flat(segments, layout)[:n], x[:n])
    lines = [line for segment in segments for line in segment]
    ends = np.cumsum([len(line) for line in lines])
    for r in range(row_of[-1] + 1):
        mine = np.flatnonzero(row_of == r)
        (at,) = {int(np.searchsorted(ends, place, side="right")) for place in layout.gather[mine].tolist()}
        line = lines[at]
        assert line[: len(mine), 0].tolist() == mine.tolist()
        assert line[len(mine) :, 0].eq(mine[-1]).all()  # beyond its end a row repeats itself: no other one is near
    flat_membership = layout.padded_membership[layout.gather[:n]]
    assert torch.equal(flat_membership, layout.membership[:n])
    assert float(layout.padded_membership.sum()) == n  # every token once


@settings(max_examples=60, deadline=None)
@given(drawn=groups_of_rows, first=st.integers(1, 4))
def test_scored_tokens_are_those_of_the_padded_computation(drawn, first):
    groups = rows_of(drawn)
    all_tokens = tokens(groups)
    start = 0
    for group, part in zip(groups, scored(groups), strict=True):
        naive = [
            [
                (p - 1, labels[p]) for p in range(1, len(labels)) if labels[p] != -100
            ]  # the first token has no prediction
            for _, labels in group
        ]
        assert part.counts.tolist() == [len(one) for one in naive]
        places, targets, at = [], [], start
        for (ids, _), one in zip(group, naive, strict=True):
            places += [at + p for p, _ in one]
            targets += [t for _, t in one]
            at += len(ids)
        assert part.at.tolist() == places
        assert part.targets.tolist() == targets
        assert all(all_tokens[p + 1][3] == t for p, t in zip(places, targets, strict=True))
        values = torch.arange(1.0, 1.0 + len(places))
        pieces = torch.split(values, [len(one) for one in naive]) if naive else []
        assert part.per_row(values).tolist() == [float(piece.double().sum()) for piece in pieces]
        assert part.per_row(values, first).tolist() == [float(piece[:first].double().sum()) for piece in pieces]
        start = at


def test_padded_rows_are_read_from_either_side():
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    labels = torch.tensor([[-100, -100, -100, 6], [-100, 8, 9, -100]])
    found = padded_rows({"input_ids": ids, "labels": labels, "attention_mask": mask})
    assert [(i.tolist(), y.tolist()) for i, y in found] == [([5, 6], [-100, 6]), ([7, 8, 9], [-100, 8, 9])]


def test_a_row_with_one_scored_token_and_one_with_none():
    one, none = ((4, 5), (4, 5)), ((6,), (6,))
    (part,) = scored([[none, one]])
    assert part.counts.tolist() == [0.0, 1.0]
    assert part.at.tolist() == [1]
    assert part.targets.tolist() == [5]
    assert part.per_row(torch.tensor([2.5])).tolist() == [0.0, 2.5]


def test_short_rows_are_not_padded_to_the_longest():
    rows = [((1,) * n, (1,) * n) for n in (2, 30, 3, 28)]
    assert sizes([rows]).widths == (3, 30)
    assert sizes([rows]).counts == (2, 2)
    assert lay_out([rows]).spread.numel() == 2 * 3 + 2 * 30
    assert Sizes(5, 0, (1, 1)).counts == (2, 3)


def test_a_layer_that_sees_a_segment_finds_its_groups():
    rows = [((1,) * n, (1,) * n) for n in (2, 4, 3)]
    layout = lay_out([rows[:1], rows[1:]])
    CURRENT.layout = layout
    try:
        whole = CURRENT.membership
        assert torch.equal(whole, layout.membership)
        CURRENT.segment = 0
        assert CURRENT.membership.tolist() == [[1.0, 0.0], [1.0, 0.0]]  # the one row of two tokens
        CURRENT.segment = 1
        assert CURRENT.membership.sum(0).tolist() == [0.0, 7.0]
        assert CURRENT.membership.shape[0] == 8
    finally:
        CURRENT.layout = CURRENT.segment = None
