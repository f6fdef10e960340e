"""What Axolotl calls, in its order:

    register, get_input_args   the keys `holdfast:` of its file
    load_datasets              what is not supported is refused, before data and model are loaded
    get_trainer_cls            Axolotl's trainer with the constraints' step
    post_trainer_create        the model is asked, conflicts leave the data, theta_0 is measured
    post_train_unload          result, audit, certificate and report

Data, model, optimizer and training loop are Axolotl's.
"""

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin

from holdfast.integrations.axolotl.held_run import HeldRun
from holdfast.integrations.axolotl.unsupported import require_supported

logger = logging.getLogger(__name__)


class HoldfastPlugin(BasePlugin):
    """Holds the model's own refusals and answers while Axolotl fine-tunes it; see docs/axolotl.md."""

    def __init__(self) -> None:
        super().__init__()
        self._run: HeldRun | None = None

    def get_input_args(self) -> str:
        return "holdfast.integrations.axolotl.settings.HoldfastArgs"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Loads nothing: Axolotl does. It is the first call that only training makes, with checked settings."""
        if not preprocess:
            require_supported(cfg)

    def get_trainer_cls(self, cfg: Any) -> type[Any]:
        from holdfast.integrations.axolotl.trainer import SafeAxolotlTrainer

        return SafeAxolotlTrainer

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self._run = HeldRun.begin(cfg, trainer)

    def post_train_unload(self, cfg: Any) -> None:
        """The weights are saved by now; the last figures are taken and the trainer is let go."""
        if self._run is None:
            logger.warning("holdfast has no run to conclude: the trainer was not made by `axolotl train`")
            return
        run, self._run = self._run, None
        run.conclude()
