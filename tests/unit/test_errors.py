"""Refusals keep their remedy when they travel between processes."""

from __future__ import annotations

import pickle

import pytest

from holdfast.core import errors

CLASSES = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.HoldfastError)
]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_a_process_border(cls):
    copy = pickle.loads(pickle.dumps(cls("what happened", remedy="what to do")))
    assert (type(copy), copy.what, copy.remedy, copy.exit_code) == (cls, "what happened", "what to do", cls.exit_code)
    assert str(copy) == "what happened\n  What to do: what to do"
