"""Step-indexed draws."""

import random

import numpy as np
import pytest

from holdfast.core.errors import ConfigError
from holdfast.data.streams import StepStream, shard


@pytest.mark.parametrize(("size", "batch"), [(7, 3), (10, 10), (5, 12), (1, 4), (12, 5)])
def test_each_pass_draws_every_example_once(size, batch):
    stream = StepStream(size, batch, seed=3, name="safety")
    draws = [i for step in range(size * 4) for i in stream.indices(step)]
    for epoch in range(4 * batch):
        assert sorted(draws[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_indices_depend_on_the_step_alone():
    stream = StepStream(50, 8, seed=1, name="safety")
    forward = [stream.indices(step) for step in range(40)]
    order = list(range(40))
    random.Random(0).shuffle(order)
    fresh = StepStream(50, 8, seed=1, name="safety")
    assert {step: fresh.indices(step) for step in order} == dict(enumerate(forward))


def test_passes_seeds_and_names_give_different_orders():
    orders = {
        tuple(StepStream(30, 30, seed, name).indices(step))
        for seed in (1, 2)
        for name in ("safety", "monitor")
        for step in (0, 1)
    }
    assert len(orders) == 8


def test_drawing_leaves_the_global_generators_alone():
    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist()
    StepStream(100, 10, seed=5, name="untouched").indices(3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_indices_are_plain_integers():
    assert all(type(i) is int for i in StepStream(9, 4, 0, "n").indices(2))


@pytest.mark.parametrize(("size", "batch"), [(0, 4), (4, 0), (4, -1)])
def test_empty_sets_and_batches_are_refused(size, batch):
    with pytest.raises(ConfigError, match="expected at least 1"):
        StepStream(size, batch, 0, "n")


def test_shards_are_equal_contiguous_and_complete():
    indices = StepStream(20, 12, 0, "n").indices(0)
    for world in (1, 2, 3, 4):
        parts = [shard(indices, rank, world) for rank in range(world)]
        assert {len(part) for part in parts} == {12 // world}
        assert [i for part in parts for i in part] == indices


@pytest.mark.parametrize(("n", "world", "proposed"), [(10, 4, 8), (2, 4, 4)])
def test_unequal_shards_are_refused(n, world, proposed):
    with pytest.raises(ConfigError, match="safety_batch_size") as caught:
        shard(list(range(n)), 0, world)
    assert caught.value.remedy.endswith(str(proposed))
