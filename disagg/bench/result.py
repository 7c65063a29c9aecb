"""A run as one value: hosts, figures per mode and point, the verdict, and the JSON of all of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from disagg.bench import Mode
from disagg.bench.beside import combined
from disagg.bench.energy import Power
from disagg.bench.plan import BenchPlan, Point
from disagg.bench.records import Record, TurnResult
from disagg.bench.stats import Figures, summary
from disagg.bench.verdict import METRICS, LinkShare, Metric, Samples, Verdict, verdict
from disagg.inference.metrics import Metrics
from disagg.version import VERSION

SIMULATED = (
    "No model ran: the times of prefill and decode are predicted. Servers, router and KV transfer are real, over the "
    "network that joins the servers; with --simulate that is this machine's loopback, and no link is simulated."
)


@dataclass(frozen=True, slots=True)
class BenchHost:
    """One host that was measured.

    hardware: as in hosts.toml, "" if not stated. backend: framework and device as the server reports them, such as
    "transformers/cuda". versions: of its packages, disagg included.
    """

    name: str
    role: str
    address: str
    hardware: str
    backend: str
    simulated: bool
    versions: Mapping[str, str]

    @property
    def device(self) -> str:
        """ "cuda" of "transformers/cuda", "cpu" of "mlx/cpu"."""
        return self.backend.rpartition("/")[2].partition(":")[0]

    @property
    def text(self) -> str:
        """Role, name, hardware and backend in one line."""
        hardware = self.hardware or "hardware not stated"
        return f"{self.role} {self.name}: {hardware}, {'no model ran' if self.simulated else self.backend}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One mode at one point."""

    point: Point
    mode: Mode
    records: tuple[Record, ...]
    figures: Figures

    @property
    def family(self) -> str:
        """The label that cells share if they differ in prompt length and mode only."""
        output = "each item's own" if self.point.output_tokens is None else f"{self.point.output_tokens:,}"
        return f"output {output}, {self.point.load.label}"

    @property
    def prompt_tokens(self) -> int | None:
        """The prompt length of the point, else the median of its requests; None if nothing completed."""
        lengths = [record.metrics.prompt_tokens for record in self.records if record.metrics]
        return self.point.prompt_tokens or (int(statistics.median(lengths)) if lengths else None)

    def seconds(self, metric: Metric) -> list[float]:
        """One value per completed request, without those that fell back: they had no hand-off to compare."""
        return [one.ttft if metric == "ttft" else one.total_time for one in self._compared]

    @property
    def handed_over(self) -> list[Metrics]:
        """The completed requests whose KV was sent from one host to another."""
        return [one for one in self._compared if one.method == "disaggregated"]

    @property
    def _compared(self) -> list[Metrics]:
        return [record.metrics for record in self.records if record.metrics and not record.fell_back]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A finished or stopped run. stopped: why it ended early, "" if it did not. left_out: items that did not fit."""

    fleet: str
    model: str
    workload: str
    date: str
    plan: BenchPlan
    cells: tuple[Cell, ...]
    verdict: Verdict
    limits: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""
    unfinished: int = 0
    left_out: int = 0
    warmup_errors: Mapping[str, int] = field(default_factory=dict)
    hosts: tuple[BenchHost, ...] = ()

    @property
    def simulated(self) -> dict[str, str]:
        """The machine that each simulated host stood for; empty if models ran."""
        return {host.name: host.hardware for host in self.hosts if host.simulated}

    @property
    def on_cpu(self) -> list[str]:
        """The hosts whose model ran on a CPU."""
        return [host.name for host in self.hosts if host.device == "cpu" and not host.simulated]

    @property
    def kind(self) -> str:
        """What every title begins with: "simulated: ", "CPU: " if a model ran on a CPU, else ""."""
        return "simulated: " if self.simulated else "CPU: " if self.on_cpu else ""

    @property
    def families(self) -> dict[str, list[Cell]]:
        """The cells by family, in order of the sweep."""
        families: dict[str, list[Cell]] = {}
        for cell in self.cells:
            families.setdefault(cell.family, []).append(cell)
        return families

    @property
    def stopped_early(self) -> str:
        """Why the run stopped, and how many requests were under way, as text."""
        if not self.unfinished:
            return self.stopped
        left = "1 request under way is" if self.unfinished == 1 else f"{self.unfinished} requests under way are"
        return f"{self.stopped}; {left} not counted"

    @property
    def failures(self) -> Counter[tuple[str, str, str]]:
        """How often each (mode, kind, message) failed."""
        return Counter(
            (cell.mode, record.error, record.message) for cell in self.cells for record in cell.records if record.error
        )

    def to_json(self) -> dict[str, Any]:
        """One object. `results` has one entry per mode and point, with the keys of `vllm bench serve` and ours."""
        common = {"simulated": bool(self.simulated), "backends": {host.name: host.backend for host in self.hosts}}
        return {
            "disagg": VERSION,
            "simulated": bool(self.simulated),
            "simulated_machines": dict(self.simulated),
            "date": self.date,
            "fleet": self.fleet,
            "model_id": self.model,
            "hosts": [asdict(host) for host in self.hosts],
            "on_cpu": self.on_cpu,
            "workload": self.workload,
            "seed": self.plan.seed,
            "burstiness": self.plan.burstiness,
            "num_prompts": self.plan.requests,
            "answers_beside": self.plan.beside,
            "goodput_limits_ms": dict(self.limits),
            "stopped": self.stopped,
            "unfinished": self.unfinished,
            "left_out": self.left_out,
            "warmup_errors": dict(self.warmup_errors),
            "failures": [
                {"mode": mode, "kind": kind, "message": message, "count": count}
                for (mode, kind, message), count in self.failures.most_common()
            ],
            "results": [{**common, **_cell_json(cell)} for cell in self.cells],
            "verdict": self.verdict.to_json(),
        }


def gather(
    plan: BenchPlan, turn_results: Sequence[TurnResult], power: Power, limits: Mapping[str, float]
) -> tuple[Cell, ...]:
    """The cells of all turns but warm-ups, in order of the sweep."""
    measured = [turn for turn in turn_results if not turn.warmup and (turn.records or turn.unfinished)]
    cells = []
    for number, point in enumerate(plan.points):
        for mode in plan.modes:
            mine = [turn for turn in measured if turn.point == number and turn.mode == mode]
            if not mine:
                continue
            records = tuple(record for turn in mine for record in turn.records)
            figures = summary(records, sum(turn.duration for turn in mine), limits)
            energy = power.per_request(mode, mine, figures.completed)
            answers = combined([turn.beside for turn in mine if turn.beside is not None])
            cells.append(Cell(point, mode, records, replace(figures, beside=answers, **energy)))
    return tuple(cells)


def judge(cells: Sequence[Cell]) -> Verdict:
    """The verdict. Points that differ in prompt length only are one family."""
    points = {cell.point: None for cell in cells}
    families: dict[str, dict[Metric, list[Samples]]] = {}
    links: dict[str, list[LinkShare]] = {}
    for point in points:
        here = [cell for cell in cells if cell.point == point]
        length = next((cell.prompt_tokens for cell in here if cell.prompt_tokens is not None), None)
        if length is None:
            continue
        family = families.setdefault(here[0].family, {metric: [] for metric in METRICS})
        for metric in METRICS:
            family[metric].append(Samples(length, {cell.mode: cell.seconds(metric) for cell in here}))
        links.setdefault(here[0].family, []).extend(
            _link_share(length, cell) for cell in here if cell.mode == "disaggregated" and cell.handed_over
        )
    return verdict(families, links)


def _link_share(length: int, cell: Cell) -> LinkShare:
    done = cell.handed_over
    return LinkShare(
        length, statistics.mean(one.exposed_transfer for one in done), statistics.mean(one.ttft for one in done)
    )


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {
        "mode": cell.mode,
        "prompt_tokens": cell.point.prompt_tokens,
        "output_tokens": cell.point.output_tokens,
        "max_concurrency": cell.point.load.concurrency,
        "request_rate": cell.point.load.rate,
        **cell.figures.to_json(),
        "requests": [record.to_json() for record in cell.records],
    }
