"""Windows read and encoded ahead: every example once and in order, as far as asked, faults where they belong."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.auditing.making import write_rows

from holdfast.auditing import windows as module
from holdfast.auditing.windows import WindowPrefetcher, layout
from holdfast.core.errors import DataError
from holdfast.data.stream import open_stream


class Counted:
    """Stands for a stream in `layout`."""

    def __init__(self, n: int) -> None:
        self.n = n


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=4), st.integers(1, 2000))
def test_windows_cover_every_role_and_grow_to_their_size(sizes, size):
    found = layout({str(i): Counted(n) for i, n in enumerate(sizes)}, size)  # type: ignore[misc]
    for i, n in enumerate(sizes):
        of_role = [k for role, k in found if role == str(i)]
        assert sum(of_role) == n
        assert all(2 * following >= k for k, following in pairwise(of_role))
        assert len(of_role) < 2 or of_role[-1] >= of_role[-2] - 1  # no small one at the end
    assert all(0 < k <= size for _, k in found)
    assert found[0][1] <= module.FIRST
    assert [role for role, _ in found] == sorted((role for role, _ in found), key=int)


def test_growth():
    assert [k for _, k in layout({"a": Counted(3000)}, 1024)] == [256, 512, 1024, 604, 604]
    assert [k for _, k in layout({"a": Counted(256), "b": Counted(513)}, 1024)] == [256, 257, 256]


@pytest.fixture
def streams(tmp_path):
    return {
        role: open_stream(write_rows(tmp_path / f"{role}.jsonl", n, seed=n))
        for role, n in (("constraint", 20), ("monitor", 7))
    }


def recorded(streams, **options):
    calls: list[int] = []

    def encode(examples):
        calls.append(len(examples))
        return [example.id for example in examples]

    return WindowPrefetcher(streams, 8, encode, **options), calls


def test_every_example_once_in_order_however_it_is_advanced(streams):
    expected = [(role, example.id) for role, stream in streams.items() for example in stream]
    for shares in ((), (0.5,), (0.1, 0.3, 0.3, 0.2, 1.0)):
        ahead, _ = recorded(streams)
        found = []
        for number, window in enumerate(ahead):
            assert window.number == number
            assert window.encoded == [example.id for example in window.examples]
            found += [(window.role, name) for name in window.encoded]
            for share in shares:
                ahead.advance(share)
        assert found == expected


def test_advancing_encodes_the_share_of_the_next_window_and_no_more(streams):
    ahead, calls = recorded(streams)
    ahead.take()
    assert calls == [8]
    ahead.advance(0.25)
    ahead.advance(0.25)
    ahead.advance(0.6)
    assert calls == [8, 2, 2]
    ahead.advance(2.0)
    assert sum(calls) == 14
    ahead.take()
    assert calls == [8, 2, 2, 2]


def test_windows_that_are_not_wanted_are_read_but_not_encoded(streams):
    ahead, calls = recorded(streams, wanted=lambda number: number == 1)
    found = list(ahead)
    assert [len(window.examples) for window in found] == [8, 6, 6, 7]
    assert [len(window.encoded) for window in found] == [0, 6, 0, 0]
    assert calls == [6]


def test_a_fault_waits_for_its_window(streams):
    def encode(examples):
        if any(example.where.endswith(":11") for example in examples):
            raise DataError("eleven", remedy="none")
        return [0] * len(examples)

    assert any(example.where.endswith(":11") for example in streams["constraint"])
    ahead = WindowPrefetcher(streams, 8, encode)
    assert ahead.take().number == 0
    ahead.advance(1.0)  # the fault is in this window: the one before can still be stored
    with pytest.raises(DataError, match="eleven"):
        ahead.take()


def test_a_file_that_grew_is_noticed(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", 8)
    stream = open_stream(path)
    with path.open("a") as handle:
        handle.write(json.dumps({"prompt": "w1 w2 w3 w4", "completion": "w5"}) + "\n")
    ahead, _ = recorded({"audit": stream})
    with pytest.raises(DataError, match="changed while it was being read"):
        list(ahead)
