"""Where each public data set lies: its files in a folder, its id, splits and commit on the hub.

The commits are the ones that other public repositories pin for these data sets. None is known for
BeaverTails-Evaluation: its head is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.data import canonical
from holdfast.data.canonical import Row

Convert: TypeAlias = Callable[[Mapping[str, Any]], Row]


@dataclass(frozen=True)
class File:
    """A file of the folder: its converter, the names of its columns where it has no header, and whether rows lack."""

    path: str
    convert: Convert
    columns: tuple[str, ...] = ()
    partial: bool = False


@dataclass(frozen=True)
class Split:
    """Where one split is: in the first of `files` that exists, or under `hub` (None: not on the hub)."""

    files: tuple[File, ...]
    hub: str | None = None


@dataclass(frozen=True)
class Source:
    """A data set: its splits (the first is the default), its hub id, and the commit that is loaded (None: the head)."""

    convert: Convert
    splits: dict[str, Split]
    hub: str | None = None
    subset: str | None = None
    revision: str | None = None


def _one(path: str, convert: Convert, split: str = "train") -> Source:
    return Source(convert, {split: Split((File(path, convert),))})


_NEWS = ("label", "title", "description")
SOURCES: dict[str, Source] = {
    "beavertails": Source(
        canonical.beavertails,
        {
            "train": Split(
                (
                    File("beavertails/30k_train.jsonl", canonical.beavertails),
                    File("beavertails/30k_train_partial.jsonl", canonical.beavertails, partial=True),
                ),
                "30k_train",
            ),
            "test": Split((File("beavertails/30k_test.jsonl", canonical.beavertails),), "30k_test"),
        },
        hub="PKU-Alignment/BeaverTails",
        revision="8401fe609d288129cc684a9b3be6a93e41cfe678",
    ),
    "beavertails_evaluation": Source(
        canonical.beavertails_evaluation,
        {"test": Split((File("beavertails/evaluation_700.json", canonical.beavertails_evaluation),), "test")},
        hub="PKU-Alignment/BeaverTails-Evaluation",
    ),
    "refusals": _one("safety_tuned_llamas/safety_only_data_Instructions.json", canonical.refusals),
    "harmful_with_refusals": _one("beavertails/harmful_with_refusals_747.json", canonical.harmful_with_refusals),
    "advbench": _one("advbench/harmful_behaviors.csv", canonical.advbench, "test"),
    "xstest": _one("xstest/xstest_prompts.csv", canonical.xstest, "test"),
    "sst2": Source(
        canonical.sst2,
        {
            "train": Split((File("sst2_glue/train.tsv", canonical.sst2),), "train"),
            "validation": Split((File("sst2_glue/dev.tsv", canonical.sst2),), "validation"),
        },
        hub="stanfordnlp/sst2",
        revision="8d51e7e4887a4caaa95b3fbebbf53c0490b58bbb",
    ),
    "ag_news": Source(
        canonical.ag_news,
        {
            "train": Split(
                (
                    File("ag_news/train.csv", canonical.ag_news_columns, _NEWS),
                    File("ag_news/train_partial.jsonl", canonical.ag_news, partial=True),
                ),
                "train",
            ),
            "test": Split((File("ag_news/test.csv", canonical.ag_news_columns, _NEWS),), "test"),
        },
        hub="fancyzhx/ag_news",
        revision="eb185aade064a813bc0b7f42de02595523103ca4",
    ),
    "gsm8k": Source(
        canonical.gsm8k,
        {
            "train": Split((File("gsm8k/train.jsonl", canonical.gsm8k),), "train"),
            "test": Split((File("gsm8k/test.jsonl", canonical.gsm8k),), "test"),
        },
        hub="openai/gsm8k",
        subset="main",
        revision="740312add88f781978c0658806c59bc2815b9866",
    ),
}
NAMES: tuple[str, ...] = tuple(SOURCES)
