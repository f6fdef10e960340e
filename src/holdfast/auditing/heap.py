"""Garbage collections that skip what was alive before.

Encoding makes many small lists, so Python looks for cycles again and again, now and then among all objects there are;
with torch and transformers loaded these are several hundred thousand, and the device waits meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """Leave all present objects out of garbage collections; new ones are still collected.

    A heap that its owner has frozen already (`gc.freeze`) stays as it is: thawing it would undo that.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
