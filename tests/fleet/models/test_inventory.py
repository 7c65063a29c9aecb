from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from disagg.config import load
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.models.inventory import StoredModel, stored_models
from tests.fleet.models.hub_models import files, write_folder
from tests.testbed.bed import HOSTS_TOML


def stored(folder: Path) -> StoredModel:
    host = replace(load(HOSTS_TOML).hosts["mac-studio-1"], connector="local")
    return stored_models(LocalMachine("here"), sys.executable, host, [str(folder)])[str(folder)]


def test_a_folder_that_is_not_there_is_absent(tmp_path: Path) -> None:
    assert stored(tmp_path / "none").state == "absent"


def test_the_missing_files_of_a_partial_model_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", files())
    assert stored(folder).state == "complete"
    (folder / "tokenizer.json").unlink()
    model = stored(folder)
    assert model.state == "partial" and model.missing == "misses tokenizer.json"
    assert model.config and model.digests["tokenizer"] == ""
