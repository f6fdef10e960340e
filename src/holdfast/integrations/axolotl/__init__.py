"""The Axolotl plugin, docs/axolotl.md: `plugins: [holdfast.integrations.axolotl.HoldfastPlugin]` in an Axolotl file."""

from typing import Any

from holdfast.core.errors import ResourceError

AXOLOTL = "0.19.0"
"""The version that `make test-axolotl` installs and tests."""


def __getattr__(name: str) -> Any:
    """The plugin's class, loaded when Axolotl asks for it.

    Axolotl prints an ImportError of a plugin and goes on without it: without any protection, that is. Hence another
    error, which ends the run.
    """
    if name != "HoldfastPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from holdfast.integrations.axolotl.held_run import HoldfastPlugin
    except ImportError as error:
        what = f"the Axolotl plugin cannot be loaded: {error}"
        raise ResourceError(what, remedy=f"install holdfast and axolotl=={AXOLOTL} into one environment") from error
    return HoldfastPlugin
