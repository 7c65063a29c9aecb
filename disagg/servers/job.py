"""One admitted request on its way through a host."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field

from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeTiming
from disagg.servers.schemas import PromptBody


@dataclass(slots=True)
class Job:
    """Times are time.monotonic(). `held` gives back, in any case, what the job holds: its place and turn, its ticket,
    its KV, its row in the batch. `id` is the caller's, for logs and the transfer; `key` is unique on this host."""

    id: str
    tokens: list[int]
    body: PromptBody
    sampling: Sampling
    held: ExitStack
    arrived: float
    tokenised: float
    slot_sent: float = 0.0
    key: str = field(default_factory=lambda: secrets.token_hex(8))

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
        waited_s = queue_s + timing.started - timing.submitted  # for a turn, and for the engine's thread
        return {
            "tokenise_s": self.tokenise_s,
            "kv_wait_s": kv_accepted - self.slot_sent if kv_accepted is not None else 0.0,
            "queue_s": waited_s,
            "ingest_s": timing.ingested - kv_accepted - waited_s if kv_accepted is not None else 0.0,
            "compute_s": 0.0 if handed_over else first_step,
            "first_step_s": first_step if handed_over else 0.0,
        }
