"""disagg/engines/vllm/profile.py: what vLLM computes in another way than the checkpoint states."""

from __future__ import annotations

import pytest

from disagg.engines.vllm.load import version_fits
from disagg.engines.vllm.profile import require_norms
from disagg.errors import ModelError


def test_an_epsilon_that_config_json_does_not_have_is_refused() -> None:
    require_norms([1e-5], 1e-5)
    require_norms([1e-5], None)
    require_norms([], 1e-6)
    with pytest.raises(ModelError, match=r"with an epsilon of 1e-05, its config\.json has 1e-06"):
        require_norms([1e-5], 1e-6)


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.32.0", True), ("0.33.1+cu130", True), ("0.31.9", False), ("0.34.0", False), ("1.0", False)],
)
def test_only_versions_that_the_connector_is_written_for_are_used(version: str, fits: bool) -> None:
    assert version_fits(version) is fits
