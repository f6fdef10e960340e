"""`benchmarks.step_sections`: every part of a step is timed, and nothing stays wrapped."""

from __future__ import annotations

import json
import sys

from benchmarks import step_sections

from holdfast.constraint.filter import SafetyFilter


def test_the_parts_of_a_step_are_timed(tmp_path, monkeypatch):
    out, before = tmp_path / "sections.json", SafetyFilter.arm
    options = ["--shape", "tiny", "--steps", "3", "--warm-up", "1", "--options", "anchor=true draw=importance verify=4"]
    monkeypatch.setattr(sys, "argv", ["step_sections", *options, "--safety-batch", "2", "--output", str(out)])
    step_sections.main()
    found = json.loads(out.read_text())["parts"]
    assert SafetyFilter.arm is before
    assert {"SafeTrainer.training_step", "SafetyFilter.arm", "SafetyFilter._after_step", "SideData.choose"} <= set(
        found
    )
    assert found["SafetyFilter.arm"]["calls_a_step"] == 1  # without the warm-up's
    assert found["SideData.choose"]["calls_a_step"] == 2  # one for each set
    assert found["SafetyFilter._after_step"]["ms_a_step"] >= found["SafetyFilter._correct"]["ms_a_step"] > 0
