"""The machine that holdfast runs on."""

import resource
import sys


def peak_memory() -> int:
    """The most bytes that this process has held in memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10  # in bytes there, elsewhere in KiB
