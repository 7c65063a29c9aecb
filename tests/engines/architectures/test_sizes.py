"""The sizes in docs/architectures.md are those of a published model, or left out."""

from __future__ import annotations

import pytest

from tests.engines.architectures.configs import config
from tests.surveys.architectures import sizes
from tests.surveys.tables import known


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe", "nemotron_h", "granitemoehybrid", "mistral"])
def test_sizes_are_left_out_if_the_default_configuration_is_not_that_of_a_model(name: str) -> None:
    assert sizes(name, known()[name]) == ("", "", "")


def test_sizes_are_those_of_the_default_configuration() -> None:
    assert sizes("qwen3_next", config("qwen3_next")) == ("36 state, 12 full", "24,576", "77,266,944")
    assert sizes("mixtral", config("mixtral")) == ("32 full", "131,072", "")
