"""Settings for every test: no network, no spinning threads, no cache outside the test's own folder."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from importlib import import_module

# Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# On ARM a product of tiny matrices takes 70 microseconds by oneDNN, and 15 by BLAS.
os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_DIM", "128")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import hypothesis
import pytest

from tests import cheaper

datasets.disable_progress_bars()
# Importing and collecting makes objects that stay: a tenth of that time went into looking for garbage among them.
gc.set_threshold(100_000, 20, 100)
# Two busy cores make single examples slow; a deadline would test the machine, not the code.
hypothesis.settings.register_profile("holdfast", deadline=None, derandomize=True)
hypothesis.settings.load_profile("holdfast")


def pytest_configure() -> None:
    cheaper.calls()


def pytest_collection_finish() -> None:
    """Every training run and every pair released collects garbage: not each time among all objects of torch."""
    if "tests.tiny" in sys.modules:
        import_module("transformers.models.llama.modeling_llama")
        import_module("holdfast.training.trainer")
        cheaper.training()
    gc.collect()
    gc.freeze()
    if "tests.forkserver" in sys.modules:
        import_module("tests.forkserver").begin()


_ended = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Nor among what hundreds of tests leave behind in pytest."""
    if next(_ended) % 200 == 0:
        gc.collect()
        gc.freeze()


_tests = itertools.count()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch, request):
    """Reference losses never leak from one test to another; the embedded model's cache is shared on purpose.

    Not in `tmp_path`: a folder for each of thousands of tests, most of which write nothing, takes half of their time.
    """
    if "embedded" not in request.fixturenames:
        monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path_factory.getbasetemp() / f"holdfast-cache-{next(_tests)}"))
