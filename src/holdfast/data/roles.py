"""Data sets with roles that a run file names instead of files: `task: {role: align}`, `safety: {role: constraint}`.

A protocol decides which public examples align a model, steer, watch, certify, poison and are trained against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class DrawRoles(Protocol):
    """Draws every role."""

    def __call__(self, settings: Mapping[str, Any]) -> Roles:
        """Args: settings: of the protocol, by name; `protocol:` of a run file."""


PROTOCOLS: Registry[DrawRoles] = Registry("protocol")
