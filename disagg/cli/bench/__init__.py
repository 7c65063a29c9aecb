"""`disagg bench` and the measurements below it.

load       `disagg bench` without a subcommand: requests, disaggregated and on each machine alone
simulate   the fleet that `disagg bench --simulate` loads
link       `disagg bench link`: the path between hosts in the KV direction
handoff    `disagg bench handoff`: KV from torch tensors to ready MLX caches, beside other ways
predict    `disagg bench predict`: its result, from the machines' arithmetic and memory speed
arguments  what they read from their command lines
options    the options of `disagg bench`
"""

from __future__ import annotations

import typer

from disagg.cli.bench import arguments, handoff, link, load, predict
from disagg.cli.common.hosts import FanOutCommand
from disagg.cli.common.options import Command

app = typer.Typer(name="bench", cls=arguments.Group, invoke_without_command=True)
app.callback(invoke_without_command=True)(load.load)
app.command("handoff", cls=Command)(handoff.handoff)
app.command("link", cls=FanOutCommand)(link.link)
app.command("predict", cls=Command)(predict.predict)
