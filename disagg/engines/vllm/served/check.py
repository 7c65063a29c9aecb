"""What is asked of a `vllm serve` before it gets orders, and every reason to refuse it."""

from __future__ import annotations

from typing import Final

from disagg.api.delivery import DESCRIBE, ConnectorInfo
from disagg.api.layout import Layout
from disagg.engines.model import profile
from disagg.engines.vllm.served.calls import VLLMServer
from disagg.engines.vllm.served.forms import COMPLETIONS, MODELS, START_COMMAND, model_names, order_answer, prompt_body
from disagg.errors import DisaggError, FingerprintMismatch, LayoutMismatch, ModelError
from disagg.extras import install
from disagg.kv.fingerprint import Fingerprint
from disagg.version import VERSION

PATIENCE_S: Final = 60.0
"""For the one token that describes a server: it may be computing long prompts of other callers."""


def describe(server: VLLMServer, wanted: str | None) -> tuple[str, ConnectorInfo]:
    """The model's name at this server, and what its connector is; it computes a token for this. wanted: the name, if
    hosts.toml has one. ModelError if it cannot be ordered anything."""
    names = model_names(server.ask("GET", MODELS, None, PATIENCE_S))
    name = served_name(names, wanted, server.url)
    content = server.ask("POST", COMPLETIONS, prompt_body(name, [0], "", DESCRIBE), PATIENCE_S)
    answer = order_answer(content)
    if answer is None:
        raise ModelError(
            f"the vllm serve at {server.url} has no connector of disagg", f"start it as in {START_COMMAND}"
        )
    if answer.error is not None:
        raise DisaggError.from_json(answer.error)
    if answer.connector is None:
        raise ModelError(
            f"the connector at {server.url} knows nothing of its ranks",
            "start vllm serve without VLLM_ENABLE_V1_MULTIPROCESSING=0",
        )
    return name, answer.connector


def served_name(names: list[str], wanted: str | None, url: str) -> str:
    """The model's name in requests. ModelError if the server has none of that name."""
    if wanted is not None and wanted not in names:
        message = f"the vllm serve at {url} serves {', '.join(names)}, not {wanted}"
        raise ModelError(message, "correct engine.model; an adapter (LoRA) is refused: decode hosts do not have it")
    if not names:
        raise ModelError(f"the vllm serve at {url} serves no model", "start it with one")
    return wanted or names[0]


def require(found: ConnectorInfo, url: str, layout: Layout, fingerprint: Fingerprint, context: int) -> None:
    """Raise ModelError unless orders to this server give KV of this layout and fingerprint, for so many tokens."""
    if found.version != VERSION:
        raise ModelError(
            f"the vllm serve at {url} has disagg {found.version}, this host {VERSION}",
            f"{install('server')}, in vLLM's environment, and start it again",
        )
    try:
        theirs = Fingerprint.from_json(found.fingerprint)
        fingerprint.require_same(theirs, mine="hosts.toml", theirs="vllm serve")
        layout.require_same(Layout.from_json(found.layout), mine="hosts.toml", theirs="vllm serve")
    except FingerprintMismatch as error:
        raise ModelError(f"the vllm serve at {url} serves another model: {error.message}", error.hint) from error
    except LayoutMismatch as error:
        raise ModelError(f"the vllm serve at {url} has other KV: {error.message}", _DTYPE) from error
    if found.context < context:
        raise ModelError(
            f"the vllm serve at {url} serves {found.context} tokens, the model's context in hosts.toml is {context}",
            f"start it with --max-model-len {context}",
        )
    profile.require(found.preflight)


_DTYPE: Final = "start it with the --dtype of hosts.toml, or state its dtype in the engine's table"
