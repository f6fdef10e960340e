"""The prompts of an evaluation outside a study: those of the evaluation role."""

from dataclasses import replace

import pytest
from tests.protocol_data import make_data_folder

from holdfast.core.errors import ConfigError, DataError
from holdfast_lab.protocol.roles import RoleSettings, draw_roles, evaluation_prompts

SETTINGS = RoleSettings(
    safe="beavertails", harm_prompts="beavertails_test", align=20, constraint=None, monitor=8, certify=12, asked=4,
    harmful=15, poison=20, evaluation=20, seed=3,
)  # fmt: skip
SOURCE = "beavertails_test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_data_folder(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("source", ["beavertails_test", "beavertails_evaluation"])
def test_they_are_the_evaluation_role(folder, source):
    roles = draw_roles(replace(SETTINGS, harm_prompts=source), folder=folder)
    assert evaluation_prompts(source, 20, seed=3, folder=folder) == roles.evaluation
    assert evaluation_prompts(source, 7, seed=3, folder=folder) == roles.evaluation[:7]


@pytest.mark.parametrize("n", [0, -1])
def test_under_one_prompt_is_refused(folder, n):
    with pytest.raises(ConfigError, match=f"^{n} evaluation prompts"):
        evaluation_prompts(SOURCE, n, folder=folder)


def test_more_prompts_than_there_are_is_refused(folder):
    with pytest.raises(DataError, match="41 prompts of beavertails_test are asked for, there are 40"):
        evaluation_prompts(SOURCE, 41, folder=folder)
