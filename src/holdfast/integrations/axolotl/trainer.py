"""`SafeAxolotlTrainer`: Axolotl's trainer with safety sets, chance constraints and the defense `holdfast`.

Axolotl makes the trainer; `hold` then gives it what it holds. The task's loss, batches, optimizer and schedule stay
Axolotl's: a step that the constraints leave alone is Axolotl's, bit for bit.
"""

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from axolotl.core.trainers import AxolotlTrainer

from holdfast.constraint.chance import ChanceConstraint
from holdfast.data.splits import Split
from holdfast.training import support
from holdfast.training.hooks import Defense
from holdfast.training.safety import encode_set
from holdfast.training.side_data import SideData
from holdfast.training.trainer import SafeTrainer


class SafeAxolotlTrainer(SafeTrainer, AxolotlTrainer):
    """Made by Axolotl; `hold` comes before `train`."""

    _name = "Axolotl"

    def __init__(self, *args: object, **kwargs: object) -> None:
        super(SafeTrainer, self).__init__(*args, **kwargs)  # Axolotl's: what is held is not known yet
        self.screening = None
        self._attached_to: Any = None
        self._measured = False
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}

    def hold(self, sets: Mapping[str, Split], constraints: Mapping[str, ChanceConstraint], defense: Defense) -> None:
        """Hold these sets from now on: theta_0, which the model still is, is measured on them."""
        args = self.args
        support.require_supported_arguments(args)
        support.require_supported_engine(self.accelerator, adapter=hasattr(self.model, "peft_config"))
        support.require_supported_model(self.model, vision=False)
        self.defense = defense
        encoded = {
            name: encode_set(name, constraints[name], split, self.processing_class, max_length=args.max_length)
            for name, split in sets.items()
        }
        self._compose(SideData(self, encoded, None, None))

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """As Axolotl's; where a step is logged, with the constraints' figures since the last time."""
        if "loss" in logs:
            logs |= {name: fmean(values) for name, values in self._metrics["train"].items()}
            self._metrics["train"].clear()
        super().log(logs, *args, **kwargs)
