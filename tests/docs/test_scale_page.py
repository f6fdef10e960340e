"""The planned tables are those that the model of a step prints."""

from __future__ import annotations

from pathlib import Path

from benchmarks import scale

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_tables_are_printed_from_the_model():
    for shape in scale.SHAPES:
        assert f"**{shape.name}**\n\n{scale.table(shape)}\n" in PAGE


def test_parameters_are_those_of_the_published_models():
    """Counts of the models' own cards, in billions; Qwen2.5-32B has biases besides."""
    found = {shape.name: scale.parameters(scale.Plan(shape, 1, "ddp", rank=0)) / 1e9 for shape in scale.SHAPES}
    assert {name: round(count, 2) for name, count in found.items()} == {
        "Llama-3.1-8B": 8.03, "Qwen2.5-32B": 32.76, "Llama-3.1-70B": 70.55,
    }  # fmt: skip
