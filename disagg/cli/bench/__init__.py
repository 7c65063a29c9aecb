"""`disagg bench` and the measurements below it.

load       `disagg bench` without a subcommand: requests, disaggregated and on each machine alone
link       `disagg bench link`: the path between hosts in the KV direction
handoff    `disagg bench handoff`: KV from torch tensors to ready MLX caches, beside other ways
predict    `disagg bench predict`: its result, from the machines' arithmetic and memory speed
checks     checks of its options, before anything is measured
result     its progress, and its tables
"""

from __future__ import annotations

import typer

from disagg.cli.bench import checks, handoff, link, load, predict
from disagg.cli.common.hosts import FanOutCommand
from disagg.cli.common.options import Command

app = typer.Typer(name="bench", cls=checks.Group, invoke_without_command=True)
app.callback(invoke_without_command=True)(load.load)
app.command("handoff", cls=Command)(handoff.handoff)
app.command("link", cls=FanOutCommand)(link.link)
app.command("predict", cls=Command)(predict.predict)
