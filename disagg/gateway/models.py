"""The models of the fleet as clients list them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import Any, Final

import msgspec

from disagg.config import Fleet, Model
from disagg.gateway.clients.access import may_use, require_model
from disagg.gateway.clients.keys import Key
from disagg.gateway.dialects.ollama import timestamp
from disagg.version import VERSION


def listed(fleet: Fleet, key: Key | None, created: float) -> dict[str, Any]:
    """GET /v1/models: those that the key is for. created: when the gateway started, in seconds since 1970; a model has
    no date of its own."""
    return {
        "object": "list",
        "data": [_described(model, created) for model in fleet.models.values() if may_use(key, model)],
    }


def listed_by_anthropic(fleet: Fleet, key: Key | None, created: float) -> dict[str, Any]:
    """GET /v1/models as Anthropic's clients read it."""
    models = [_of_anthropic(model, created) for model in fleet.models.values() if may_use(key, model)]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {"first_id": None, "last_id": None}
    return {"data": models, "has_more": False, **ends}


def described_by_anthropic(fleet: Fleet, key: Key | None, name: str, created: float) -> dict[str, Any]:
    """GET /v1/models/NAME as Anthropic's clients read it. Raises UnknownModel and ModelNotAllowed."""
    return _of_anthropic(require_model(fleet, key, name), created)


def described(fleet: Fleet, key: Key | None, name: str, created: float) -> dict[str, Any]:
    """GET /v1/models/NAME. Raises UnknownModel and ModelNotAllowed."""
    return _described(require_model(fleet, key, name), created)


_DETAILS: Final = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}
"""The hosts' files are not known here."""
_NEVER: Final = "9999-12-31T23:59:59Z"
OLLAMA_API: Final = "0.13.5"
"""The version of Ollama whose API is served. Codex refuses any below 0.13.4, VS Code's Copilot below 0.6.4."""


def tags(fleet: Fleet, key: Key | None, created: float) -> dict[str, Any]:
    """Ollama's GET /api/tags, without sizes: each model under its name and under each alias."""
    visible = [model for model in fleet.models.values() if may_use(key, model)]
    return {"models": [{**one, "modified_at": timestamp(created)} for model in visible for one in _tagged(model)]}


def served(fleet: Fleet, key: Key | None, live: Collection[str]) -> dict[str, Any]:
    """Ollama's GET /api/ps. live: the names of models that a host serves now. They are never unloaded."""
    visible = (model for model in fleet.models.values() if may_use(key, model) and model.name in live)
    more = {"size_vram": 0, "expires_at": _NEVER}
    return {"models": [{**next(_tagged(model)), **more, "context_length": model.context} for model in visible]}


def version() -> dict[str, str]:
    """Ollama's GET /api/version."""
    return {"version": OLLAMA_API, "disagg": VERSION}


def shown(fleet: Fleet, key: Key | None, name: str, created: float) -> dict[str, Any]:
    """Ollama's POST /api/show. Raises UnknownModel and ModelNotAllowed."""
    model = require_model(fleet, key, name)
    info = {"general.architecture": "disagg", "general.basename": model.name, "disagg.context_length": model.context}
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _DETAILS,
        "model_info": info,
        "capabilities": ["completion", "tools", "thinking"],
        "modified_at": timestamp(created),
    }


def _tagged(model: Model) -> Iterator[dict[str, Any]]:
    """The entries of one model, that of its name first. Clients take names of the same digest for aliases of one
    model."""
    digest = hashlib.sha256(msgspec.json.encode([model.name, sorted(model.sources.items())])).hexdigest()
    for name in (model.name, *model.aliases):
        yield {"name": name, "model": name, "size": 0, "digest": digest, "details": _DETAILS}


def _described(model: Model, created: float) -> dict[str, Any]:
    """max_model_len: as in vLLM; agents read it."""
    return {
        "id": model.name,
        "object": "model",
        "created": int(created),
        "owned_by": "disagg",
        "aliases": model.aliases,
        "max_model_len": model.context,
    }


def _of_anthropic(model: Model, created: float) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": timestamp(created),
        "max_input_tokens": model.context,
        "max_tokens": model.context,
    }
