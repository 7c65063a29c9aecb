"""The models of the fleet as clients list them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from disagg.config import Fleet, Model
from disagg.gateway.clients.access import may_use, require_model
from disagg.gateway.clients.keys import Key
from disagg.gateway.dialects.ollama import timestamp


def listed(fleet: Fleet, key: Key | None, created: float) -> dict[str, Any]:
    """GET /v1/models: those that the key is for. created: when the gateway started, in seconds since 1970; a model has
    no date of its own."""
    return {
        "object": "list",
        "data": [_described(model, created) for model in fleet.models.values() if may_use(key, model)],
    }


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


def tags(fleet: Fleet, key: Key | None, created: float) -> dict[str, Any]:
    """Ollama's GET /api/tags, without sizes and digests."""
    visible = (model for model in fleet.models.values() if may_use(key, model))
    return {"models": [{**_tagged(model), "modified_at": timestamp(created)} for model in visible]}


def served(fleet: Fleet, key: Key | None, live: Collection[str]) -> dict[str, Any]:
    """Ollama's GET /api/ps. live: the names of models that a host serves now. They are never unloaded."""
    visible = (model for model in fleet.models.values() if may_use(key, model) and model.name in live)
    more = {"size_vram": 0, "expires_at": _NEVER}
    return {"models": [{**_tagged(model), **more, "context_length": model.context} for model in visible]}


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


def _tagged(model: Model) -> dict[str, Any]:
    return {"name": model.name, "model": model.name, "size": 0, "digest": "", "details": _DETAILS}


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
