"""Data sets with roles that a run file names instead of files: `task: {role: align}`, `safety: {role: constraint}`.

A protocol decides which public examples align a model, steer, watch, certify, poison and are trained against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from holdfast.core.registry import Registry
from holdfast.data.examples import Example

PAPER = "paper"


class Roles(Protocol):
    """Who sees which examples; no two of the held-out roles share a prompt."""

    @property
    def align(self) -> Sequence[Example]: ...
    @property
    def constraint(self) -> Sequence[Example]: ...
    @property
    def monitor(self) -> Sequence[Example]: ...
    @property
    def certify(self) -> Sequence[Example]: ...
    @property
    def poison(self) -> Sequence[Example]: ...
    @property
    def harmful(self) -> Sequence[Example]: ...


# Draws every role by the settings of the protocol: `protocol:` of a run file.
DrawRoles = Callable[[Mapping[str, Any]], Roles]
PROTOCOLS: Registry[DrawRoles] = Registry("protocol")
