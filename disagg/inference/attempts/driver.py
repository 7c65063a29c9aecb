"""What the requests of one client share, and a request as those who run it and those who route it see it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from disagg.api.requests import GenerateBody
from disagg.config import Host
from disagg.inference.attempts.suspects import Suspects
from disagg.inference.attempts.waiting import RetryBudget
from disagg.inference.attempts.waking import Loads
from disagg.inference.hosts.affinity import RoutedPrompt
from disagg.inference.hosts.background import Heartbeat, Refresher
from disagg.inference.hosts.route import Candidates, Ranking, RouteRequest, rank
from disagg.inference.hosts.view import FleetView
from disagg.inference.http.connections import Connections
from disagg.inference.policy import DEFAULT_POLICY, RetryPolicy

LONG_TOKENS = 1024  # a prompt for whose route the hosts' loads are worth a round trip
FIRST_LOADS_S = 0.5  # a host that has not answered by then is used as one of which nothing is known


class Driver:
    """What the requests of one client share: its connections, and what it has seen of the fleet. keepers: the hosts
    with several models, by name."""

    def __init__(
        self,
        http: Connections,
        policy: RetryPolicy = DEFAULT_POLICY,
        keepers: Mapping[str, Host] = MappingProxyType({}),
    ) -> None:
        self.http = http
        self.policy = policy
        self.view = FleetView()
        self.refresher = Refresher(http, self.view, keepers)
        self.loads = Loads(http, self.view, keepers, policy.timeouts)
        self.heartbeat = Heartbeat(http, policy.timeouts.lease)
        self.budget = RetryBudget(policy.retries_per_s)
        self.suspects = Suspects(http, self.view)

    async def close(self) -> None:
        await self.refresher.stop()
        await self.loads.stop()
        await self.heartbeat.stop()
        await self.http.aclose()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to run. called: time.monotonic() when the caller asked for the answer. start: a random number for the
    choice among equal hosts. via: the Via header of whole requests, empty if they have none."""

    candidates: Candidates
    body: GenerateBody
    called: float
    policy: RetryPolicy = DEFAULT_POLICY
    start: int = field(default_factory=lambda: random.getrandbits(32))
    via: str = ""

    @property
    def may_answer_alone(self) -> bool:
        """Whether one host may answer while the other one loads: no hand-off is asked for."""
        policy = self.policy
        return policy.local_prefill and policy.on_kv_failure == "fallback" and not isinstance(self.body.split, int)


def routed(
    view: FleetView, request: GenerationRequest, prompt: RoutedPrompt, *, last_look: bool = False
) -> RouteRequest:
    """The request as routing sees it."""
    return RouteRequest(
        request.candidates,
        prompt.tokens,
        request.body.sampling.max_tokens,
        view.affinity.held(prompt.chain),
        last_look,
        request.body.share,
        request.body.split,
    )


def ranking(view: FleetView, request: GenerationRequest, prompt: RoutedPrompt, *, last_look: bool = False) -> Ranking:
    """The hosts for a request, as the view sees them now; see RouteRequest."""
    return rank(view, routed(view, request, prompt, last_look=last_look), time.monotonic(), request.start)


def may_be_divided(request: GenerationRequest, prompt: RoutedPrompt) -> bool:
    """Whether it matters for this request that its hosts are known: its prompt is long, or to be divided in any case,
    or a prefill host has some layers only."""
    split = request.body.split
    return any(not host.answers for host in request.candidates.prefill) or (
        split != "off" and (split != "auto" or prompt.tokens >= LONG_TOKENS)
    )
