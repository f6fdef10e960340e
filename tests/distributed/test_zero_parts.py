"""The parts of ZeRO: cut as DeepSpeed lays weights out, stepped once, and spread; tests/deepspeed has the real one.

The stand-in has what `holdfast.training.zero` uses of DeepSpeed's optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.constraint.filter import SafetyFilter
from holdfast.core.errors import UnsupportedError
from holdfast.training.zero import HeldEngine, Parts, PartSpace, SourceGradient

PADDING = 3


class StandIn:
    """One group, whose parameters lie in the reverse order of the group, with padding at the end."""

    step: Callable[[], None]

    def __init__(self, clip: float) -> None:
        params = [nn.Parameter(torch.arange(2.0)), nn.Parameter(torch.arange(3.0) + 10)]
        self.optimizer = torch.optim.AdamW(params, lr=0.1)
        flat = torch.cat([params[1], params[0], torch.zeros(PADDING)]).detach()
        params[1].data, params[0].data = flat[:3], flat[3:5]
        self.bit16_groups, self.bit16_groups_flat = [params], [flat]
        self.single_partition_of_fp32_groups = [flat.clone()]
        self.optimizer.param_groups[0]["params"] = self.single_partition_of_fp32_groups
        self.averaged_gradients: dict = {0: [torch.ones(3), torch.full((2,), 2.0), torch.zeros(PADDING)]}
        self.all_grad_tensors: dict = {0: None}
        self.micro_step_id, self.clip_grad = -1, clip

    def update_lp_params(self) -> None:
        self.bit16_groups_flat[0].copy_(self.single_partition_of_fp32_groups[0])

    def refresh_fp32_params(self) -> None:
        self.single_partition_of_fp32_groups[0].copy_(self.bit16_groups_flat[0])

    def scaled_global_norm(self) -> torch.Tensor:
        return torch.cat(self.averaged_gradients[0]).norm()

    def unscale_and_clip_grads(self, gradients, norm) -> None:
        for gradient in gradients:
            gradient.mul_(min(1.0, self.clip_grad / float(norm)))


@pytest.fixture(autouse=True)
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def made(clip: float = 100.0) -> tuple[StandIn, Parts]:
    stand_in = StandIn(clip)
    return stand_in, Parts(SimpleNamespace(optimizer=stand_in))


def test_a_vector_is_cut_as_the_weights_lie():
    _, parts = made()
    (found,) = parts.cut([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])])
    assert found.tolist() == [3.0, 4.0, 5.0, 1.0, 2.0, 0.0, 0.0, 0.0]


def test_side_gradients_leave_out_the_hooks_of_backward():
    _, parts = made()
    first, second = parts.sources
    first.register_post_accumulate_grad_hook(lambda p: pytest.fail("DeepSpeed would take it for the task's"))
    gradient = SourceGradient(PartSpace(parts))
    gradient.add((first * torch.tensor([1.0, 2.0])).sum())
    gradient.add(first.sum() + 2 * second[0])
    assert gradient.reduced()[0].tolist() == [2.0, 0.0, 0.0, 2.0, 3.0, 0.0, 0.0, 0.0]
    assert first.grad is None


def test_a_filtered_step_reaches_the_model():
    stand_in, parts = made()
    filt = SafetyFilter(parts.optimizer, rate=0.5, metric="identity")
    before = stand_in.bit16_groups_flat[0].clone()
    parts.take_gradients()
    h = parts.cut([torch.tensor([1.0, 0.0]), torch.tensor([0.0, -1.0, 0.0])])
    filt.arm([0.4], [h])
    stand_in.step()  # what DeepSpeed's engine calls
    moved = stand_in.bit16_groups_flat[0] - before
    assert filt.last_event is not None
    assert str(filt.last_event.name) == "active"
    assert float(moved @ h[0]) == pytest.approx(-0.2, abs=1e-5)
    assert torch.equal(torch.cat([*stand_in.bit16_groups[0][::-1]]), stand_in.bit16_groups_flat[0][:5])
    assert stand_in.averaged_gradients == {0: None}
    assert parts.params[0].grad is None


def test_the_norm_is_that_of_the_gradient_with_what_the_filter_added():
    stand_in, parts = made(clip=1.0)
    parts.take_gradients()
    space = PartSpace(parts)
    space.add_to_gradient([[torch.full((8,), 1.0)]], [2.0])  # as the dual term does
    held = HeldEngine(None, parts)
    assert held.get_global_grad_norm() == pytest.approx((3 * 9 + 2 * 16 + 3 * 4) ** 0.5)
    gradient = space.task_gradient()
    assert space.dots([(gradient, gradient)])[0] == pytest.approx(1.0)
    space.drop_gradient()  # a step that is discarded
    assert held.get_global_grad_norm() == 0.0
    weights = stand_in.bit16_groups_flat[0].clone()
    stand_in.step()
    assert torch.equal(stand_in.bit16_groups_flat[0], weights)


def test_weights_that_were_loaded_are_the_next_steps():
    stand_in, parts = made()
    with torch.no_grad():
        stand_in.bit16_groups[0][1].fill_(7.0)
    parts.refresh()
    assert PartSpace(parts).weights()[0][:3].tolist() == [7.0] * 3


def test_another_deepspeed_is_refused():
    unknown = StandIn(1.0)
    del unknown.averaged_gradients
    with pytest.raises(UnsupportedError, match="its StandIn has no averaged_gradients") as caught:
        Parts(SimpleNamespace(optimizer=unknown))
    assert "deepspeed==" in caught.value.remedy


def test_the_model_is_on_its_device_before_deepspeed_takes_it(tmp_path):
    """There theta_0 is measured; transformers would leave the model where it was loaded."""
    args = hf.SafeSFTConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    assert args.place_model_on_device is None
    args.deepspeed_plugin = SimpleNamespace()
    assert args.place_model_on_device is True
