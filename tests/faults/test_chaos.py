"""tests/faults/chaos.py: what its report says of prompts whose prefill host was killed."""

from __future__ import annotations

from tests.faults.chaos import Event, Outcome, Report, Settings, lost_tokens, table

LOG = """
"KV transfer of request 7: the sender is lost in the chunk of tokens [1024, 1536), with 250 of its 1000 bytes"
"KV transfer of request 7 failed: prefill-1 closed the connection"
"KV transfer of request 8: the sender is lost in the chunk of tokens [0, 512), with 1000 of its 1000 bytes"
"""


def test_tokens_that_are_computed_again_are_the_share_of_each_chunk_that_had_come() -> None:
    assert lost_tokens(LOG) == [128, 512]
    assert lost_tokens("") == []


def test_the_report_states_their_distribution_over_chunks_and_killed_hosts() -> None:
    report = Report(Settings(split=2), [Outcome("exact", 0.0, 1.0)])
    report.events = [
        Event("prefill-1", "killed", 1.0, lost=[128.0, 512.0]),
        Event("prefill-2", "killed", 2.0, lost=[64.0]),
        Event("prefill-2", "killed", 3.0),
        Event("decode-1", "killed", 3.0),
    ]
    (line,) = (line for line in table(report) if "computed again" in line)
    assert line.startswith("3 prefill hosts were killed, 2 within 3 chunks;")
    assert line.endswith("p50, p90, max: 128, 512, 512; per killed host: 640, 640, 640")
