"""Fine-tune a language model while at most a fraction alpha of your safety examples get worse by more than tau.

Importing this package executes nothing heavy: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.auditing.audit import audit as audit
    from holdfast.auditing.certify import certify as certify
    from holdfast.auditing.result import Audit as Audit
    from holdfast.auditing.verify import verify as verify
    from holdfast.certification.certificate import Certificate as Certificate
    from holdfast.certification.certificate import certify_counts as certify_counts
    from holdfast.certification.power import plan as plan
    from holdfast.config import load_config as load_config
    from holdfast.constraint.barrier import barrier_multiplier as barrier_multiplier
    from holdfast.constraint.chance import ChanceConstraint as ChanceConstraint
    from holdfast.constraint.filter import SafetyFilter as SafetyFilter
    from holdfast.pipeline import run as run
    from holdfast.screening.screen import Screening as Screening
    from holdfast.screening.screened import screen as screen
    from holdfast.screening.settings import ScreeningSettings as ScreeningSettings
    from holdfast.trainers.config import SafeSFTConfig as SafeSFTConfig
    from holdfast.trainers.trainer import SafeSFTTrainer as SafeSFTTrainer

_HOMES = {
    "Audit": "holdfast.auditing.result",
    "Certificate": "holdfast.certification.certificate",
    "ChanceConstraint": "holdfast.constraint.chance",
    "SafeSFTConfig": "holdfast.trainers.config",
    "SafeSFTTrainer": "holdfast.trainers.trainer",
    "SafetyFilter": "holdfast.constraint.filter",
    "Screening": "holdfast.screening.screen",
    "ScreeningSettings": "holdfast.screening.settings",
    "audit": "holdfast.auditing.audit",
    "barrier_multiplier": "holdfast.constraint.barrier",
    "certify": "holdfast.auditing.certify",
    "certify_counts": "holdfast.certification.certificate",
    "load_config": "holdfast.config",
    "plan": "holdfast.certification.power",
    "run": "holdfast.pipeline",
    "screen": "holdfast.screening.screened",
    "verify": "holdfast.auditing.verify",
}

__all__ = [
    "Audit",
    "Certificate",
    "ChanceConstraint",
    "SafeSFTConfig",
    "SafeSFTTrainer",
    "SafetyFilter",
    "Screening",
    "ScreeningSettings",
    "audit",
    "barrier_multiplier",
    "certify",
    "certify_counts",
    "load_config",
    "plan",
    "run",
    "screen",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
