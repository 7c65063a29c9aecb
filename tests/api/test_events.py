"""disagg/api/events.py: what a log may have of an answer."""

from __future__ import annotations

from disagg.api.events import DoneEvent, Timing


def test_the_figures_of_an_answer_have_none_of_its_callers_text() -> None:
    done = DoneEvent(
        finish_reason="stop",
        prompt_tokens=3,
        completion_tokens=2,
        computed_prompt_tokens=3,
        timing=Timing(),
        stop="Yours, Ada",
    )
    assert "Ada" in str(done.to_json()) and "Ada" not in str(done.figures)
    assert done.figures["prompt_tokens"] == 3 and set(done.to_json()) - set(done.figures) == {"stop"}
