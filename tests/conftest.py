"""Settings for every test: no network, no spinning threads, no cache outside the test's own folder."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
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
import jinja2
import pytest
import typer.main

datasets.disable_progress_bars()
# Two busy cores make single examples slow; a deadline would test the machine, not the code.
hypothesis.settings.register_profile("holdfast", deadline=None, derandomize=True)
hypothesis.settings.load_profile("holdfast")


def pytest_configure() -> None:
    """Flushing to disk takes 40 % of a checkpoint's time, and only a power cut would show whether it happened."""
    os.fsync = os.fstat  # type: ignore[assignment]
    # Every checkpoint has PEFT's model card, from a template that is compiled anew; every trainer asks for the version
    # of PEFT, every command in this process for all commands.
    jinja2.Environment.compile = functools.lru_cache(jinja2.Environment.compile)  # type: ignore[assignment]
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    typer.main.get_command = functools.cache(typer.main.get_command)


def pytest_collection_finish() -> None:
    """Every training run and every pair released collects garbage: not each time among all objects of torch."""
    if "tests.tiny" in sys.modules:
        import_module("transformers.models.llama.modeling_llama")
        import_module("holdfast.training.trainer")
        import_module("tests.tokenised").once()
    gc.collect()
    gc.freeze()


_ended = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Nor among what hundreds of tests leave behind in pytest."""
    if next(_ended) % 200 == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch, request):
    """Reference losses never leak from one test to another; the embedded model's cache is shared on purpose."""
    if "embedded" not in request.fixturenames:
        monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "holdfast-cache"))
