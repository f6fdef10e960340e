"""Attacks on evidence: every test builds a forgery or a fault and demands that it is refused."""

from __future__ import annotations

import logging
import warnings

import pytest

from tests.attacks.shim import command

__all__ = ["command"]


@pytest.fixture(autouse=True)
def _library_settings():
    """The command line quiets libraries and takes over our logger; other tests must not notice."""
    logger = logging.getLogger("holdfast")
    before = (list(logger.handlers), logger.propagate)
    with warnings.catch_warnings():
        yield
    logger.handlers, logger.propagate = before
