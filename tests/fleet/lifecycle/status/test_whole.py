"""The state of a whole-request host, against a server of OpenAI's API in this process."""

from __future__ import annotations

import pytest

from disagg.fleet.lifecycle.status.ask import poll_whole
from tests.whole.fake_openai import MODEL_THERE, Script, openai_server, whole_host


@pytest.mark.parametrize(("mib", "state", "why"), [(2, "healthy", ""), (5, "foreign", "over 4194304 bytes")])
def test_a_list_of_models_is_as_long_as_requests_accept(mib: int, state: str, why: str) -> None:
    described = [f"{number} {'x' * 1000}" for number in range(mib * 1024)]
    with openai_server(Script(models=[MODEL_THERE, *described])) as port:
        host = whole_host("m", port)
        status = poll_whole(host, 5.0)
    assert status.state == state and why in status.why
