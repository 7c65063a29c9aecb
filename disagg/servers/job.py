"""One admitted request on its way through a host."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from disagg.engines.base import DecodeTiming, Sampling
from disagg.servers.schemas import PromptBody


@dataclass(slots=True)
class Job:
    """Times are time.monotonic(). `held` gives back, in any case, what the job holds: its place and turn, its ticket,
    its KV, its row in the batch."""

    id: str
    tokens: list[int]
    body: PromptBody
    sampling: Sampling
    held: ExitStack
    arrived: float
    tokenised: float
    slot_sent: float = 0.0

    @property
    def deadline(self) -> float:
        return self.arrived + self.body.deadline_s

    @property
    def tokenise_s(self) -> float:
        return self.tokenised - self.arrived

    def parts(self, queue_s: float, timing: DecodeTiming, kv_accepted: float | None) -> dict[str, float]:
        """This host's parts of TTFT, in seconds. Alone, the prompt's compute includes the first decode step."""
        first_step = timing.first_token - timing.ingested
        handed_over = kv_accepted is not None
        return {
            "tokenise_s": self.tokenise_s,
            "kv_wait_s": kv_accepted - self.slot_sent if kv_accepted is not None else 0.0,
            "queue_s": queue_s if handed_over else queue_s + timing.ingested - timing.submitted,
            "ingest_s": timing.ingested - kv_accepted - queue_s if kv_accepted is not None else 0.0,
            "compute_s": 0.0 if handed_over else first_step,
            "first_step_s": first_step if handed_over else 0.0,
        }
