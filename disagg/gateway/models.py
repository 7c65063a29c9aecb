"""The models of the fleet as clients list them."""

from __future__ import annotations

from typing import Any

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


def tags(fleet: Fleet, key: Key | None, created: float) -> dict[str, Any]:
    """Ollama's GET /api/tags. The hosts' files are not known here: there is no size and no digest."""
    return {
        "models": [
            {"name": model.name, "model": model.name, "modified_at": timestamp(created), "size": 0, "digest": ""}
            for model in fleet.models.values()
            if may_use(key, model)
        ]
    }


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
