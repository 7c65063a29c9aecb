"""tests/surveys: the table in docs/architectures.md, and what a run of the survey makes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Event

import pytest
import tomli

import tests.surveys.__main__ as surveys
from disagg.errors import ModelError
from tests.preloaded import AVAILABLE, RUN_VARIABLE, run_id
from tests.surveys.__main__ import emptied, names, wanted
from tests.surveys.tables import (
    COLUMNS,
    ENGINES,
    FIRST_COUNT,
    LAST_COUNT,
    Row,
    between,
    counts,
    failure,
    read_table,
    short,
    state,
    write_cells,
    write_patches,
    write_verdicts,
)

MODEL = Path("/somewhere/model")
PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{MODEL}: it has no weights", "it has no weights"),
        (
            f"mlx-lm cannot load {MODEL}: ValueError:\n  no such type",
            "mlx-lm cannot load the model: ValueError: no such type",
        ),
        ("a | b", "a / b"),
        ("x" * 181, "x" * 177 + "..."),
    ],
    ids=["of a folder", "of several lines", "with a bar", "long"],
)
def test_a_reason_fits_a_cell_and_does_not_name_the_folder(text: str, shown: str) -> None:
    assert short(text, MODEL) == shown


@pytest.mark.parametrize(
    ("message", "cell"),
    [
        (
            "model type 'minimax' cannot be served: mlx-lm has",
            "refused: model type 'minimax' cannot be served: mlx-lm has",
        ),
        (f"{MODEL}: vLLM cannot serve it: no class", "fails: vLLM cannot serve it: no class"),
        ("vLLM cannot compute this model: KeyError: 3", "fails: vLLM cannot compute this model: KeyError: 3"),
        (f"mlx-lm cannot load {MODEL}: KeyError: 3", "fails: mlx-lm cannot load the model: KeyError: 3"),
        (
            "vLLM cannot compute this model: CPU GDN attention requires BF16.",
            "not on a CPU: vLLM cannot compute this model: CPU GDN attention requires BF16.",
        ),
        ("vLLM cannot prefill it: others on a CPU", "not on a CPU: vLLM cannot prefill it: others on a CPU"),
    ],
)
def test_a_framework_that_fails_is_told_from_what_disagg_refuses(message: str, cell: str) -> None:
    assert failure(ModelError(message), MODEL) == cell


TABLE = """before
<!-- counts -->
<!-- end of counts -->
between
<!-- table -->
| head |
| --- |
| gpt_oss | 1 full | exact | exact | exact |  | 1e-4 | 10 |  |
| gpt_oss_yarn | 1 full | patched | exact | refused: vLLM cannot | – | 1e-4 | 10 |  |
| afmoe |  | exact | – |  |  |  |  |  |
| dbrx |  | fails: transformers cannot | – | – | – |  |  |  |
| llama4 | 1 full | patched | exact | not on a CPU: triton |  | 1e-4 | 10 |  |
| llama4_text |  | refused: mlx-lm | – | – | – |  |  |  |
<!-- end of table -->
after
"""
COUNTS = """| 6 rows | exact | patched | refused by disagg | a framework fails | not on a CPU | not tried | not made |
| --- | --- | --- | --- | --- | --- | --- | --- |
| transformers | 2 | 2 | 1 | 1 | 0 | 0 | 0 |
| vLLM | 1 | 0 | 1 | 0 | 1 | 2 | 1 |
| vLLM, two ranks | 1 | 0 | 0 | 0 | 0 | 3 | 2 |

transformers and mlx-lm load 4 model types. disagg refuses 1 of them: llama4_text.

vLLM and mlx-lm compute 1 model types. disagg refuses 0 of them.
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(TABLE, encoding="utf-8")
    return path


def test_cells_are_put_into_their_row_and_counted_and_the_rest_of_the_page_stays(page: Path) -> None:
    write_cells(page, "gpt_oss", {"ranks": "exact"})
    rows = read_table(page)
    assert rows["gpt_oss"] | {"ranks": "exact", "vllm": "exact", "layers": "1 full"} == rows["gpt_oss"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n<!-- counts -->\n{COUNTS}<!-- end of counts -->\nbetween\n")
    assert text.endswith("after\n")
    write_cells(page, "new", {"transformers": "exact"})
    assert list(read_table(page)) == [*rows, "new"]


def test_a_model_type_is_refused_if_all_of_its_rows_are(page: Path, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.toml"
    write_verdicts(page, file)
    found = tomli.loads(file.read_text(encoding="utf-8"))
    del found["gpt_oss"]["defaults"], found["afmoe"]["defaults"]
    assert found["gpt_oss"] == {"transformers": "patched", "vllm": "exact", "served": True}
    assert found["afmoe"] == {"transformers": "exact"}
    assert found["dbrx"]["transformers"] == "fails: transformers cannot"
    write_cells(page, "gpt_oss", {"vllm": "refused: it fails"})
    write_verdicts(page, file)
    assert tomli.loads(file.read_text(encoding="utf-8"))["gpt_oss"]["vllm"] == "refused: it fails"


def test_a_whole_checkpoint_and_its_text_part_alone_have_verdicts_of_their_own(page: Path, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.toml"
    write_verdicts(page, file)
    found = tomli.loads(file.read_text(encoding="utf-8"))
    whole = {"transformers": "patched", "vllm": "not on a CPU: triton", "served": True, "text": "llama4_text"}
    assert found["llama4"] == whole
    stated = {"hidden_act": "silu", "max_position_embeddings": 4096 * 32}
    assert found["llama4_text"] == {"transformers": "refused: mlx-lm", "defaults": stated}


def test_defaults_of_the_keys_that_decide_are_those_of_transformers(page: Path, tmp_path: Path) -> None:
    write_cells(page, "kimi_linear", {"transformers": "exact"})
    write_verdicts(page, tmp_path / "verdicts.toml")
    found = tomli.loads((tmp_path / "verdicts.toml").read_text(encoding="utf-8"))["kimi_linear"]
    assert found["defaults"]["num_experts_per_tok"] == 8
    assert found["names"]["num_experts_per_tok"] == "num_experts_per_token"
    assert found["names"]["max_position_embeddings"] == "model_max_length"


def row(**cells: str) -> Row:
    return {**dict.fromkeys(COLUMNS, "–"), "transformers": "exact", **cells}


def test_a_run_makes_what_is_empty_or_shows_a_defect_and_with_vllm_only_what_is_handed_over() -> None:
    rows = {
        "llama": row(vllm="exact", ranks="exact"),
        "qwen3": row(vllm="exact", ranks=""),
        "qwen2": row(vllm="**differs** at 2 tokens"),
        "phi3": row(),  # it was not handed over when this was written
        "dbrx": row(transformers="fails: so"),
    }
    assert wanted(rows, ["llama", "qwen3"], "vllm") == ["llama", "qwen3"]
    assert wanted(rows, [], "vllm") == ["phi3", "qwen2", "qwen3"]
    empty = wanted(rows, [], "transformers")
    assert not set(rows) & set(empty)
    assert "gpt_oss" in empty


def test_a_table_that_is_made_anew_has_the_rows_of_today_and_keeps_the_cells_of_the_other_engine() -> None:
    rows = {"llama": row(vllm="exact"), "gone": row()}
    whole = emptied(rows, [], ["transformers", "vllm"])
    assert set(whole) == set(names()) and set(whole["llama"].values()) == {""}
    some = emptied(rows, ["llama"], ["transformers"])
    assert some["gone"] == rows["gone"]
    assert some["llama"] == dict.fromkeys(COLUMNS, "") | {"vllm": "exact", "ranks": "–"}


def test_an_interrupted_run_keeps_what_is_made_and_the_next_one_makes_the_rest(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting, ended, asked = Event(), Event(), list[str]()

    def made(name: str, engine: str) -> Row:
        asked.append(name)
        if name == "phi3" and not ended.is_set():
            interrupting.wait(60)
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(60)
            return {"transformers": "**ended** with exit code -9"}
        if name == "qwen3":
            interrupting.set()
        return row()

    class Forks:
        def close(self) -> None:
            ended.set()

    monkeypatch.setattr(surveys, "made", made)
    monkeypatch.setattr(surveys, "preloaded_process", Forks)
    chosen = ["phi3", "qwen2", "qwen3", "llama", "mixtral"]
    with pytest.raises(KeyboardInterrupt):
        surveys.Run(page, chosen, ["transformers"]).make_all()
    assert read_table(page)["qwen2"] == row()
    assert "phi3" not in read_table(page)
    monkeypatch.setattr(surveys, "names", lambda: chosen)
    asked.clear()
    surveys.Run(page, [], ["transformers"]).make_all()
    assert {"phi3"} <= set(asked) <= set(chosen) - {"qwen2"}
    assert all(read_table(page)[name] == row() for name in chosen)


@pytest.mark.slow
@pytest.mark.skipif(not AVAILABLE, reason="forks on Linux only")
def test_a_process_makes_the_cells_of_a_row_with_real_servers_or_says_what_a_framework_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, run_id())
    made = surveys.made("apertus", "transformers")
    assert {made[column] for column in ("transformers", "splits")} == {"exact"}
    assert (made["layers"], made["bytes per token"], made["bytes of states"]) == ("32 full", "524,288", "–")
    failed = surveys.made("bitnet", "transformers")
    assert failed["transformers"].startswith("fails: mlx-lm cannot load the model: ")
    assert {cell for column, cell in failed.items() if column != "transformers"} == {"–"}


def test_the_table_has_every_model_type_that_both_frameworks_know_and_none_is_wrong() -> None:
    rows = read_table(PAGE)
    assert set(rows) == set(names())
    assert {name for name, row in rows.items() if any(cell.startswith("**") for cell in row.values())} == set()
    assert all(row[engine] == "" or state(row[engine]) for row in rows.values() for engine in ENGINES)
    assert all(row["transformers"] and row["splits"] for row in rows.values())


def test_what_is_counted_above_the_table_is_in_it() -> None:
    assert between(PAGE, FIRST_COUNT, LAST_COUNT)[1] == counts(read_table(PAGE))


def test_the_page_has_every_patch(tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    write_patches(copy)
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
