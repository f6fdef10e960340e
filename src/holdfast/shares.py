"""The certify shares of a run: what to know about them before training, and their entry in the ledger."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.config import RunConfig
from holdfast.config.build import constraints, defense
from holdfast.stages.certifiable import certify_note, close_share, openings_note
from holdfast.stages.prepare import Prepared

logger = logging.getLogger(__name__)


def warn_about_data(config: RunConfig, data: Prepared) -> None:
    """Log which data are given and not used, and which written safety sets cannot, or only just, certify the run."""
    unused = {"harmful": config.harmful is not None and data.harmful is None}
    unused["unaligned"] = config.unaligned is not None and "unaligned" not in defense(config).needed(config.stage)
    for key in (key for key, given in unused.items() if given):
        logger.warning("`%s` is given, and %s does not use it in this stage", key, config.defense.name)
    warn_of_shares(config, data, list(data.safety))


def warn_of_shares(config: RunConfig, data: Prepared, names: Sequence[str], scope: str = "") -> None:
    """Log which certify shares are too small, or opened already.

    Args:
        names: of the safety sets.
        scope: in which public certify prompts are counted (`share_scope`).
    """
    limits = constraints(config)
    for name in names:
        limit = limits[name]
        record, openings = data.safety[name].record, config.safety[name].openings
        if (found := certify_note(record, alpha=limit.alpha, openings=openings)) is not None:
            logger.warning("%s: %s", name, found)
        certify, source = data.safety[name].certify, config.safety[name].data
        within = scope if name in config.prompt_sets else None
        found = openings_note(source, certify, openings=openings, run=config.output_dir, scope=within)
        if found is not None:
            logger.warning("%s: %s", name, found)


def close_shares(config: RunConfig, data: Prepared, scope: str = "") -> None:
    """Note the certify shares of this run as closed: in the ledgers beside their data files, or in the cache's."""
    for name, block in config.safety.items():
        if block.data is not None or name in config.prompt_sets:
            certify, within = data.safety[name].certify, scope if name in config.prompt_sets else None
            close_share(block.data, name, certify, openings=block.openings, run=config.output_dir, scope=within)
