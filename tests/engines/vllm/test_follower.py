"""disagg/engines/vllm/follower.py: the connection that shows that the head is there."""

from __future__ import annotations

import socket

import pytest

from disagg.engines.vllm.follower import _connected
from disagg.engines.vllm.nodes import Endpoint
from disagg.errors import ModelError


def test_the_kernel_checks_whether_a_silent_head_is_still_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        to = Endpoint("127.0.0.1", meeting.getsockname()[1])
        with _connected(to) as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            of_tcp = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
            assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in of_tcp] == [5, 2, 3]
    with pytest.raises(ModelError, match="has gone"):
        _connected(to)
