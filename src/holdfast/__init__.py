"""Fine-tune a language model while at most a fraction alpha of your safety examples get worse by more than tau.

Importing this package executes nothing heavy: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast import events as events
    from holdfast.auditing.audit import audit as audit
    from holdfast.auditing.opening import certify as certify
    from holdfast.auditing.verify import verify as verify
    from holdfast.certification.certificate import Certificate as Certificate
    from holdfast.certification.certificate import certify_counts as certify_counts
    from holdfast.certification.power import plan as plan
    from holdfast.constraint.barrier import barrier_multiplier as barrier_multiplier
    from holdfast.constraint.chance import ChanceConstraint as ChanceConstraint
    from holdfast.constraint.filter import SafetyFilter as SafetyFilter
    from holdfast.core import errors as errors
    from holdfast.records.audit import Audit as Audit
    from holdfast.records.certificate import CertificateRecord as CertificateRecord
    from holdfast.reporting.page import report as report
    from holdfast.runs.config import RunConfig as RunConfig
    from holdfast.runs.config import load_config as load_config
    from holdfast.runs.pipeline import RunResult as RunResult
    from holdfast.runs.pipeline import run as run
    from holdfast.screening.screen import Screening as Screening
    from holdfast.screening.screen import screen as screen
    from holdfast.screening.settings import PromptSet as PromptSet
    from holdfast.screening.settings import ScreeningSettings as ScreeningSettings
    from holdfast.training.config import SafeSFTConfig as SafeSFTConfig
    from holdfast.training.dpo import SafeDPOConfig as SafeDPOConfig
    from holdfast.training.dpo import SafeDPOTrainer as SafeDPOTrainer
    from holdfast.training.grpo import SafeGRPOConfig as SafeGRPOConfig
    from holdfast.training.grpo import SafeGRPOTrainer as SafeGRPOTrainer
    from holdfast.training.hooks import Defense as Defense
    from holdfast.training.trainer import SafeSFTTrainer as SafeSFTTrainer

    __version__: str

_HOMES = {
    "Audit": "holdfast.records.audit",
    "Certificate": "holdfast.certification.certificate",
    "CertificateRecord": "holdfast.records.certificate",
    "ChanceConstraint": "holdfast.constraint.chance",
    "Defense": "holdfast.training.hooks",
    "PromptSet": "holdfast.screening.settings",
    "RunConfig": "holdfast.runs.config",
    "RunResult": "holdfast.runs.pipeline",
    "SafeDPOConfig": "holdfast.training.dpo",
    "SafeDPOTrainer": "holdfast.training.dpo",
    "SafeGRPOConfig": "holdfast.training.grpo",
    "SafeGRPOTrainer": "holdfast.training.grpo",
    "SafeSFTConfig": "holdfast.training.config",
    "SafeSFTTrainer": "holdfast.training.trainer",
    "SafetyFilter": "holdfast.constraint.filter",
    "Screening": "holdfast.screening.screen",
    "ScreeningSettings": "holdfast.screening.settings",
    "audit": "holdfast.auditing.audit",
    "barrier_multiplier": "holdfast.constraint.barrier",
    "certify": "holdfast.auditing.opening",
    "certify_counts": "holdfast.certification.certificate",
    "load_config": "holdfast.runs.config",
    "plan": "holdfast.certification.power",
    "report": "holdfast.reporting.page",
    "run": "holdfast.runs.pipeline",
    "screen": "holdfast.screening.screen",
    "verify": "holdfast.auditing.verify",
}
_MODULES = {"errors": "holdfast.core.errors", "events": "holdfast.events"}

__all__ = [
    "Audit",
    "Certificate",
    "CertificateRecord",
    "ChanceConstraint",
    "Defense",
    "PromptSet",
    "RunConfig",
    "RunResult",
    "SafeDPOConfig",
    "SafeDPOTrainer",
    "SafeGRPOConfig",
    "SafeGRPOTrainer",
    "SafeSFTConfig",
    "SafeSFTTrainer",
    "SafetyFilter",
    "Screening",
    "ScreeningSettings",
    "__version__",
    "audit",
    "barrier_multiplier",
    "certify",
    "certify_counts",
    "errors",
    "events",
    "load_config",
    "plan",
    "register_defense",
    "report",
    "run",
    "screen",
    "verify",
]


def register_defense(name: str) -> Callable[[type[Defense]], type[Defense]]:
    """Class decorator that makes a `Defense` known by `name`: to run files, `SafeSFTTrainer` and `holdfast ls`."""
    from holdfast.training.hooks import DEFENSES

    return DEFENSES.register(name)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from holdfast.core.version import VERSION

        return VERSION
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
