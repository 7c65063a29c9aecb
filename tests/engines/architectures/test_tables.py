"""tests/surveys: the table in docs/architectures.md, and what a run of the survey makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli

from tests.surveys.__main__ import names, wanted
from tests.surveys.tables import read_table, short, write_cells, write_patches, write_verdicts

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


TABLE = """before
<!-- table -->
| head |
| --- |
| gpt_oss | 1 full | exact | exact | exact |  | 1e-4 | 10 |  |
| gpt_oss_yarn | 1 full | patched | exact | refused: vLLM cannot |  | 1e-4 | 10 |  |
| afmoe |  | exact | – |  |  |  |  |  |
<!-- end of table -->
after
"""


def test_cells_are_put_into_their_row_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(TABLE, encoding="utf-8")
    write_cells(page, "gpt_oss", {"ranks": "exact"})
    write_cells(page, "new", {"transformers": "exact"})
    rows = read_table(page)
    assert rows["gpt_oss"] | {"ranks": "exact", "vllm": "exact", "layers": "1 full"} == rows["gpt_oss"]
    assert list(rows) == ["gpt_oss", "gpt_oss_yarn", "afmoe", "new"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n")


def test_a_model_type_is_refused_if_all_of_its_rows_are(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "verdicts.toml"
    page.write_text(TABLE, encoding="utf-8")
    write_verdicts(page, file)
    assert tomli.loads(file.read_text(encoding="utf-8")) == {
        "gpt_oss": {"transformers": "patched", "vllm": "exact", "served": True},
        "afmoe": {"transformers": "exact"},
    }
    write_cells(page, "gpt_oss", {"vllm": "refused: it fails"})
    write_verdicts(page, file)
    assert tomli.loads(file.read_text(encoding="utf-8"))["gpt_oss"]["vllm"] == "refused: it fails"


def test_a_run_makes_what_is_empty_and_with_vllm_only_what_is_handed_over() -> None:
    rows = {
        "llama": dict.fromkeys(("transformers", "vllm"), "exact"),
        "qwen3": {"transformers": "exact"},
        "dbrx": {"transformers": "refused: it fails"},
    }
    assert wanted(rows, ["llama", "qwen3"], ["vllm"], anew=False) == [("llama", "vllm"), ("qwen3", "vllm")]
    empty = wanted(rows, [], ["transformers", "vllm"], anew=False)
    assert ("qwen3", "vllm") in empty
    assert not {("llama", "vllm"), ("dbrx", "vllm"), ("qwen3", "transformers")} & set(empty)
    assert ("gpt_oss", "transformers") in empty


def test_the_table_has_every_model_type_that_both_frameworks_know_and_none_is_wrong() -> None:
    rows = read_table(PAGE)
    assert set(rows) == set(names())
    for name, row in rows.items():
        for engine in ("transformers", "vllm", "ranks"):
            assert row[engine].startswith(("exact", "patched", "refused: ", "no tiny model")) or not row[engine], name
        assert row["transformers"], name


def test_the_page_has_every_patch(tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    write_patches(copy)
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
