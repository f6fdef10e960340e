"""The Axolotl plugin: `plugins: [holdfast.integrations.axolotl.HoldfastPlugin]` in an Axolotl file (docs/axolotl.md)."""

from holdfast.core.errors import ResourceError

try:
    from holdfast.integrations.axolotl.plugin import HoldfastPlugin as HoldfastPlugin
except ImportError as error:
    # Axolotl prints an ImportError of a plugin and trains without it: without any protection, that is.
    what = f"the Axolotl plugin cannot be imported: {error}"
    raise ResourceError(what, remedy="install holdfast and axolotl==0.19.0 into one environment") from error
