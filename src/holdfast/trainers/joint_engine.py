"""The fused step's engine for one run: built at its first step, tried on a few rows, or declined with a reason."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from holdfast.constraint.completion import causal_lm
from holdfast.core.errors import UnsupportedError
from holdfast.core.ranks import gather_objects, rank
from holdfast.data.encode import Encoded
from holdfast.fused.body import Body, EagerPasses
from holdfast.fused.grouped_lora import GroupedAdapter
from holdfast.fused.joint_pass import JointPass
from holdfast.fused.probe import probe_rows, strange
from holdfast.fused.recorded import RecordedPasses
from holdfast.fused.reference_states import ReferenceStates, fits
from holdfast.fused.support import batch_dependent, other_mixers, plain_layers
from holdfast.trainers.joint_support import longest_row, reason_against

logger = logging.getLogger(__name__)

PROBED = 64  # task rows among which those are chosen that packing is tried on


def make_joint(run: Any) -> JointPass | None:
    """The engine as `args.step` asks for it; None where steps are not fused.

    Where they could have been, `run.step_declined` then says what is against it.

    Raises:
        UnsupportedError: `step: fused`, and this defense, model or these settings do not allow it.
    """
    wanted, defense = run.args.step, run.defense
    if wanted == "two_pass" or (wanted == "auto" and run.args.device.type != "cuda"):
        return None
    if not defense.packed(run.stage):
        run.step_declined = f"defense {defense.name!r} changes the loss or the model's layers"
        if wanted == "fused":
            raise UnsupportedError(
                f"step: fused with defense {defense.name!r}, which changes the loss or the model's layers",
                remedy="set step: auto or two_pass",
            )
        return None
    found = _engine(run)
    if isinstance(found, JointPass):
        return found
    if wanted == "fused":
        raise UnsupportedError(f"step: fused is not possible: {found}", remedy="set step: auto or two_pass")
    run.step_declined = found
    if rank() == 0 and defense.joint_terms:
        logger.warning("two passes a step instead of one: %s", found)
    elif rank() == 0:
        logger.info("task rows are padded and launched kernel by kernel: %s", found)
    return None


def _engine(run: Any) -> JointPass | str:
    """The pass for this model, tried on a few rows; or why there is none, on any process."""
    body: Body | None = None
    found = reason_against(run) or _body(run)
    if isinstance(found, Body):
        body, found = found, ""
        run.model.train()  # as steps will find it: layers are checkpointed in training mode alone
        config, longest = causal_lm(run.model).config.get_text_config(), longest_row(run.args)
        found = batch_dependent(config, longest) or strange(
            EagerPasses(body), probe_rows(_examples(run), config, longest), run.processing_class.pad_token_id
        ) or ""  # fmt: skip
    reasons = [reason for reason in gather_objects(found) if reason]
    if reasons or body is None:
        return str(reasons[0])
    recorded = _records(run, body)
    what = "one pass a step for both gradients" if run.defense.joint_terms else "packed task rows"
    logger.info("%s%s", what, ", recorded as CUDA graphs" if recorded else "")
    passes = RecordedPasses(body) if recorded else EagerPasses(body)
    return JointPass(run.model, passes, run.args.device, _kept_states(run, body))


def _body(run: Any) -> Body | str:
    layers = plain_layers(run.model)
    if isinstance(layers, str):
        return layers
    mixers = other_mixers(run.model)
    if isinstance(mixers, str):
        return mixers
    adapter = GroupedAdapter(layers, 1 + (len(run.safety) if run.defense.joint_terms else 0))
    return Body(run.model, adapter, mixers, device=run.args.device, precision=run.accelerator.autocast)


def _examples(run: Any) -> list[Encoded]:
    """Rows on which packing is tried: of the safety sets, or the first of the task."""
    found = [e for one in run.safety.values() for e in one.constraint_set]
    if found:
        return found
    rows = itertools.islice((tuple(row["input_ids"]) for row in run.train_dataset), PROBED)
    return [Encoded(f"task {i}", ids, ids, False) for i, ids in enumerate(rows)]


def _kept_states(run: Any, body: Body) -> ReferenceStates | None:
    """The reference's states of kl_token sets, where there is room and every row comes up."""
    if not run.defense.joint_terms:
        return None
    sets = {name: one for name, one in run.safety.items() if one.constraint.unit == "kl_token"}
    examples = [e for one in sets.values() for e in one.constraint_set]
    draws = {name: len(run.safety_batch(name)) * run.total_steps for name in sets}
    rare = any(draws[name] < len(one.constraint_set) for name, one in sets.items())
    if not examples or rare or not fits(examples, body.width, body.dtype):
        return None
    return ReferenceStates.of(EagerPasses(body), examples, run.args.device)


def _records(run: Any, body: Body) -> bool:
    """Whether kernels are recorded: on a GPU, and not where checkpointing would have to replay dropout."""
    wanted, problem = run.args.step_graphs, None
    if wanted == "off":
        return False
    if run.args.device.type != "cuda":
        problem = "CUDA graphs need a GPU"
    elif body.checkpointed and body.adapter.dropout > 0:
        problem = "gradient checkpointing with lora_dropout draws the same masks twice, which cannot be recorded"
    if problem is not None and wanted == "on":
        raise UnsupportedError(f"step_graphs: on is not possible: {problem}", remedy="set step_graphs: auto or off")
    if problem is not None and run.args.device.type == "cuda":
        logger.warning("the step runs without CUDA graphs: %s", problem)
    return problem is None
