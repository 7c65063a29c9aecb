"""`disagg chat`: the arguments, and the one turn of a pipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.cli.common.context import settings, stderr, stdout
from disagg.cli.common.options import model_option, with_options
from disagg.cli.common.sampling import for_command_line, request_options
from disagg.cli.words import choose_models, read_prompt
from disagg.errors import RequestError, UsageError

if TYPE_CHECKING:
    from disagg.cli.chat.session import Session
    from disagg.config import Fleet
    from disagg.inference.client import AsyncClient

_MAX_TOKENS = 4096
_HISTORY = "chat_history"


@with_options(request_options, max_tokens=_MAX_TOKENS)
def chat(
    context: typer.Context,
    *,
    model: Annotated[str | None, model_option("A model of hosts.toml. Left out if the fleet has one model.")] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message.", show_default=False)] = "",
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as they are, not as Markdown.")] = False,
    options: dict[str, Any],
) -> None:
    """Talk with a model in the terminal.

    Answers are shown as Markdown while they arrive; Ctrl-C stops one, Ctrl-D leaves. Each turn goes on from the KV that
    the decode host holds, and says how much that was. Enter sends, Alt-Enter begins a new line, as does Enter between
    triple quotes. /help lists the commands. A pipe's text is one message: its answer, of at most --max-tokens, is
    printed, and that is all.
    """
    fleet = settings(context).fleet()
    (name,) = choose_models(fleet, [model] if model else (), "name one: disagg chat -m NAME")
    piped = not sys.stdin.isatty()
    if not piped and not stdout().is_terminal:
        raise UsageError("a conversation needs a terminal", f'disagg generate --chat {name} "message" > FILE')
    example = f'echo "message" | disagg chat -m {name}'
    message = read_prompt("-", None, fleet.model(name).context, example) if piped else None
    _run(fleet, name, system, {**options, "fit_context": True}, message, plain=plain)


def _run(fleet: Fleet, model: str, system: str, options: dict[str, Any], message: str | None, *, plain: bool) -> None:
    """Talk until the end of the input. message: that of a pipe, which is the only one; None: they are typed."""
    import uvloop

    from disagg.cli.chat.conversation import Conversation
    from disagg.cli.chat.session import Session
    from disagg.cli.chat.view import ChatView
    from disagg.inference.client import AsyncClient

    async def run() -> None:
        async with AsyncClient(fleet) as client:
            _require_valid(client, model, options)
            await client.connect(model)
            view = ChatView(stdout(), stderr(), plain=plain, piped=message is not None)
            session = Session(client, Conversation(model, system), options, view)
            if message is None:
                await _talk(session, fleet)
            else:
                await session.answer(message)

    uvloop.run(run())


def _require_valid(client: AsyncClient, model: str, options: dict[str, Any]) -> None:
    """Raise RequestError, which names the option, before the first message rather than after it."""
    try:
        client.explain(model, messages=[{"role": "user", "content": ""}], **options)
    except RequestError as error:
        raise for_command_line(error) from None


async def _talk(session: Session, fleet: Fleet) -> None:
    from disagg.cli.chat.editor import Editor, Recall
    from disagg.token import state_folder

    models = [name for one in fleet.models.values() for name in (one.name, *one.aliases)]
    history: Path = state_folder(fleet).parent / _HISTORY
    await session.run(Editor(Recall(history), lambda: models).read)
