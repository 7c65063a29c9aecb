"""The table of what clients can do, as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.clients.measure import Measured

TITLE: Final = """# Clients

What clients in their newest versions can do in front of the demo fleet's gateway. `python -m benchmarks.clients`
installs each into an environment of its own, asks for one feature after the other, and writes this table with
`--page`. The demo's models have learnt neither to call tools nor to follow a form: that an answer has the form is the
constraint's doing, and whether it makes sense is not measured. [gateway.md](gateway.md#clients) has settings for them.

"""
_HEAD: Final = "| client | version | works | does not |\n| --- | --- | --- | --- |\n"


def page(clients: Sequence[Measured], before: str = "") -> str:
    """The page with a row for each client. before: the page as it is, whose sections after the table stay."""
    _, heading, sections = before.partition("\n## ")
    return TITLE + _HEAD + "".join(map(_row, clients)) + heading + sections


def _row(client: Measured) -> str:
    works = ", ".join(
        _words(one.feature) + (f" ({one.note})" if one.note else "") for one in client.features if one.works
    )
    fails = [f"**{_words(one.feature)}**: {_cell(one.note)}" for one in client.features if not one.works]
    problem = [_cell(client.problem)] if client.problem else []
    return f"| {client.name} | {client.version} | {works} | {'<br>'.join([*problem, *fails])} |\n"


def _words(feature: str) -> str:
    return feature.replace("_", " ")


def _cell(text: str) -> str:
    """A text of elsewhere in a cell of a table."""
    shown = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return shown if len(shown) <= 240 else f"{shown[:239]}…"
