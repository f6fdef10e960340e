"""The machine that holdfast runs on."""

import sys


def peak_memory() -> int:
    """The most bytes that this process has held in memory so far."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10  # in bytes there, elsewhere in KiB
