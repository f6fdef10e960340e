"""Continuous batching: a row that ends makes room for the next prompt, so that few steps go to finished rows.

transformers' own (`generate_batch`) runs the model in a thread over a paged cache, and takes CUDA graphs only where an
optional flash-attention package is installed. This one is an ordinary loop over a static cache: the same code with and
without a graph. A small model decodes as fast as its kernels are launched, so that the graph is what matters.
"""

from __future__ import annotations

from holdfast.judging.engines.continuous.engine import ContinuousEngine

__all__ = ["ContinuousEngine"]
