"""disagg/engines/model/text.py: prompts of every form to ids, or one clear refusal."""

from __future__ import annotations

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from disagg.engines.model.text import HFTokenizer
from disagg.errors import ModelError, RequestError
from tests import tiny_models
from tests.tiny_models import TinyModel

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is 東京?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyModel) -> HFTokenizer:
    return HFTokenizer.load(tiny("llama"))


def test_text_gets_the_ids_that_transformers_gives_it(tiny: TinyModel, tokenizer: HFTokenizer) -> None:
    text = "Two boats 🙂, naïve"
    want = AutoTokenizer.from_pretrained(tiny("llama"))(text).input_ids
    assert tokenizer.encode(text) == want
    assert want[0] == tiny_models.BOS_ID


def test_messages_go_through_the_chat_template_once(tiny: TinyModel, tokenizer: HFTokenizer) -> None:
    want = AutoTokenizer.from_pretrained(tiny("llama")).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode(MESSAGES) == want
    assert want.count(tiny_models.TURN_ID) == 3  # two messages and the beginning of the answer
    assert tiny_models.BOS_ID not in want  # the template decides about it


BEGUN = [*MESSAGES, {"role": "assistant", "content": "It is the capital \n"}]


def test_an_answer_may_go_on_with_the_last_message_or_begin_after_it(tokenizer: HFTokenizer) -> None:
    def text(**options: Any) -> str:
        return tokenizer._tokenizer.decode(tokenizer.encode(BEGUN, **options))  # type: ignore[no-any-return]

    begun, within, closed = (text(ending=ending) for ending in ("begun", "within", "closed"))
    assert begun == closed + "<|turn|>assistant\n"
    assert closed == within + "<|end|>\n"
    assert within.endswith("<|turn|>assistant\nIt is the capital \n")


@pytest.mark.parametrize("content", ["<", "end", "|", "assistant", "<|turn|>", "It is <|end|>\n"])
def test_the_end_of_the_last_message_is_found_whatever_it_says(tokenizer: HFTokenizer, content: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    assert tokenizer.encode(messages, ending="within") == tokenizer._ids(
        tokenizer._rendered(messages, {}, "closed").removesuffix("<|end|>\n"), 10_000, special=False
    )


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[-1].content * 2 }}"])
def test_a_template_that_does_not_write_the_last_message_as_it_is_cannot_go_on_with_it(template: str) -> None:
    made = copy.deepcopy(tiny_models.tokenizer())
    made.chat_template = template
    with pytest.raises(RequestError, match=r"^continue_final_message: the model's chat template does not"):
        HFTokenizer(made, frozenset({1}), tiny_models.VOCAB).encode(BEGUN, ending="within")


def test_token_ids_are_taken_as_they_are(tokenizer: HFTokenizer) -> None:
    assert tokenizer.encode([7, 0, tiny_models.VOCAB - 1]) == [7, 0, tiny_models.VOCAB - 1]


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(tokenizer: HFTokenizer, prompt: Any) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        tokenizer.encode(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, tiny_models.VOCAB], rf"prompt\[1\] is token {tiny_models.VOCAB}.*0 to {tiny_models.VOCAB - 1}"),
        ([-1], r"prompt\[0\] is token -1"),
        ([1, "two"], r"prompt\[1\] is str"),
        ([True], r"prompt\[0\] is bool"),
        ([{"role": "user", "content": "a"}, "b"], r"messages\[1\] is str"),
        ([{"role": "king", "content": "a"}], r"messages\[0\]\.role is 'king'.*assistant"),
        ([{"content": "a"}], r"messages\[0\]\.role is None"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is not text"),
        ([{"role": "user"}], r"messages\[0\]\.content is not text"),
    ],
)
def test_unusable_prompts_are_refused_by_name(tokenizer: HFTokenizer, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer.encode(prompt)


def copy_without_template(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    (target / "chat_template.jinja").unlink()
    return target


def test_messages_for_a_model_without_chat_template_are_refused_with_a_hint(tiny: TinyModel, tmp_path: Path) -> None:
    plain = HFTokenizer.load(copy_without_template(tiny("llama"), tmp_path / "m"))
    with pytest.raises(RequestError, match=r"no chat template.*text prompt"):
        plain.encode(MESSAGES)


def test_the_reason_of_a_template_that_refuses_the_messages_is_in_the_error(tiny: TinyModel, tmp_path: Path) -> None:
    path = copy_without_template(tiny("llama"), tmp_path / "m")
    (path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        HFTokenizer.load(path).encode(MESSAGES)


def test_digests_differ_between_vocabularies_and_ignore_what_does_not_matter(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(tiny("llama"), path)
    same = HFTokenizer.load(tiny("phi3"))
    body = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    body["model"]["merges"][0], body["model"]["merges"][1] = body["model"]["merges"][1], body["model"]["merges"][0]
    (path / "tokenizer.json").write_text(json.dumps(body), encoding="utf-8")
    base = HFTokenizer.load(tiny("llama"))
    assert base.digest == same.digest  # one adds a beginning-of-sequence token, the other does not
    assert base.digest != HFTokenizer.load(path).digest
    assert (
        base.chat_template_digest != HFTokenizer.load(copy_without_template(path, tmp_path / "n")).chat_template_digest
    )


def test_end_of_sequence_tokens_do_not_show_in_the_stream(tokenizer: HFTokenizer) -> None:
    assert tokenizer.eos_ids == {tiny_models.EOS_ID, tiny_models.END_OF_TURN_ID}
    stream = tokenizer.stream()
    ids = [*tokenizer.encode("boats")[1:], *tokenizer.eos_ids]
    assert "".join(stream.push(i) for i in ids) + stream.finish() == "boats"


def test_one_tokenizer_serves_many_threads(tokenizer: HFTokenizer) -> None:
    prompts: list[Any] = [f"number {i} 🙂 " * 20 for i in range(16)] + [MESSAGES] * 16
    want = [tokenizer.encode(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, prompts * 4)) == want * 4


def test_a_folder_without_tokenizer_files_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    shutil.copy(tiny("llama") / "config.json", tmp_path)
    with pytest.raises(ModelError, match="no usable tokenizer"):
        HFTokenizer.load(tmp_path)


def test_a_corrupt_tokenizer_file_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(tiny("llama"), path)
    (path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="no usable tokenizer"):
        HFTokenizer.load(path)
