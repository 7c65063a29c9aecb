"""The models as clients list them: what their files say, whether they are loaded, and until when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from disagg.api.keeper import ModelFacts
from disagg.gateway.models import parameters
from tests.gateway.kept_models import FACTS, gateway, keeping

SIZE = FACTS.size_bytes
STATES: dict[str, dict[str, Any]] = {
    "ready": {"state": "ready", "facts": FACTS.to_json(), "expires_s": 90.0, "resident_bytes": 5_000},
    "resting": {"state": "asleep", "facts": ModelFacts(size_bytes=7, reasons=True).to_json()},
    "missing": {"state": "absent", "reason": "no weights"},
}


async def test_every_list_says_which_models_are_loaded_and_which_are_only_there() -> None:
    async with keeping(STATES) as (client, _), gateway(client) as http:
        openai = {one["id"]: one["state"] for one in (await http.get("/v1/models")).json()["data"]}
        tags = {one["name"]: one["size"] for one in (await http.get("/api/tags")).json()["models"]}
        running = {one["name"]: one for one in (await http.get("/api/ps")).json()["models"]}
        studio = {one["key"]: one for one in (await http.get("/api/v1/models")).json()["models"]}
        one = (await http.get("/v1/models/resting-alias")).json()
    assert openai == {"ready": "ready", "resting": "asleep", "missing": "absent", "single": "ready"}
    assert one["state"] == "asleep"
    own = {name: size for name, size in tags.items() if not name.endswith("-alias")}
    assert own == {"ready": SIZE, "resting": 7, "single": 0}, "what is on no disk is not listed"
    assert [*running] == ["ready", "single"]
    gone = datetime.fromisoformat(running["ready"]["expires_at"]) - datetime.now(UTC)
    assert timedelta(seconds=60) < gone <= timedelta(seconds=90)
    assert running["ready"]["size_vram"] == 5_000 and running["single"]["expires_at"].startswith("9999")
    assert {name: len(one["loaded_instances"]) for name, one in studio.items()} == {
        "ready": 1,
        "resting": 0,
        "single": 1,
    }
    assert studio["ready"]["size_bytes"] == SIZE and studio["ready"]["quantization"]["bits_per_weight"] == 16


async def test_a_model_is_shown_with_what_its_files_say_of_it() -> None:
    async with keeping(STATES) as (client, _), gateway(client) as http:
        shown = (await http.post("/api/show", json={"model": "ready"})).json()
        resting = (await http.post("/api/show", json={"model": "resting"})).json()
        single = (await http.post("/api/show", json={"model": "single"})).json()
    details, info = shown["details"], shown["model_info"]
    assert (details["parameter_size"], details["quantization_level"], details["family"]) == (
        "1.5B",
        "bfloat16",
        "qwen3",
    )
    assert (info["general.parameter_count"], info["qwen3.context_length"]) == (FACTS.parameters, 40960)
    assert (info["disagg.context_length"], shown["size"]) == (4096, SIZE)
    assert shown["capabilities"] == ["completion", "tools"] and resting["capabilities"] == ["completion", "thinking"]
    assert single["capabilities"] == ["completion", "tools", "thinking"], "no host has stated them"


def test_numbers_of_parameters_are_written_as_people_say_them() -> None:
    assert [*map(parameters, (0, 400, 1_500, 494_000_000, 30_530_000_000, 671_000_000_000))] == [
        "",
        "400",
        "2K",
        "494M",
        "30.5B",
        "671B",
    ]
