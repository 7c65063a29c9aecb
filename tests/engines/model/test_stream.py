"""disagg/engines/model/stream.py: text that streams is the text decoded at once, cut exactly at stop strings."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from disagg.engines.model.stream import MAX_HELD_TOKENS, DetokenizedStream, StopStrings
from tests import tiny_models

TEXTS = [
    "plain words, and more of them",
    "emoji 🙂👩‍👩‍👧 between words 🙂",
    "東京の天気は晴れです。",
    "  leading and   inner spaces\n\n\tand tabs ",
    "a\N{REPLACEMENT CHARACTER}b and one at the end \N{REPLACEMENT CHARACTER}",
]


def byte_level() -> Tokenizer:
    return tiny_models.tokenizer_backend()


def sentencepiece() -> Tokenizer:
    """The form of sentencepiece models in tokenizer.json: spaces as ▁, unknown characters as bytes."""
    words = ["plain", "▁words", ",", "▁and", "▁more", "▁", "▁emoji", "東", "京", "a", "b", "e", "n", "t", "▁▁"]
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.Unigram([(t, -float(i)) for t, i in vocab.items()], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


def stream_of(tokenizer: Tokenizer, stop: Sequence[str] = ()) -> DetokenizedStream:
    return DetokenizedStream(tokenizer, stops=StopStrings(stop))


def pieces(stream: DetokenizedStream, ids: Iterable[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text_decoded_at_once(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(stream_of(tokenizer), ids)) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_character_of_many_tokens_comes_out_whole_with_its_last_one(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode("a🙄b", add_special_tokens=False).ids
    out = pieces(stream_of(tokenizer), ids)
    assert "🙄" in out and "".join(out) == "a🙄b"
    assert len(ids) >= 5, "the emoji must be made of several tokens, or this test shows nothing"


def test_an_answer_cut_inside_a_character_ends_with_a_replacement_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙄").ids[:-1]
    assert "".join(pieces(stream_of(tokenizer), ids)) == tokenizer.decode(ids) == "a\N{REPLACEMENT CHARACTER}"


def test_undecodable_bytes_are_held_for_a_bounded_number_of_tokens() -> None:
    tokenizer = byte_level()
    continuation = tokenizer.encode("🙄").ids[-1]
    stream = stream_of(tokenizer)
    out = [stream.push(continuation) for _ in range(4 * MAX_HELD_TOKENS)]
    assert len("".join(out)) >= 3 * MAX_HELD_TOKENS
    assert len("".join(out) + stream.finish()) == 4 * MAX_HELD_TOKENS


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_after_undecodable_bytes_comes_out_once(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    start, noise, end = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("ab", "🙄", "be"))
    ids = [*start, *[noise[-1]] * (MAX_HELD_TOKENS + 3), *end]
    assert "".join(pieces(stream_of(tokenizer), ids)) == tokenizer.decode(ids)


def test_random_tokens_stream_to_the_text_decoded_at_once() -> None:
    tokenizer = byte_level()
    ids = random.Random(0).choices(range(5, tiny_models.VOCAB), k=400)
    assert "".join(pieces(stream_of(tokenizer), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("noise", [["<0xF0>"], ["<0xF0>", "<0x9F>"], ["<0x99>"] * 40])
def test_bytes_that_form_no_character_neither_fail_nor_hide_the_text_after_them(noise: list[str]) -> None:
    """A byte run with an invalid byte is decoded as one replacement character per byte, also its valid beginning."""
    tokenizer = sentencepiece()
    tokens = ["a", "<0x3B>", *noise, "b", "▁more", "▁and"]
    vocabulary = tokenizer.get_vocab()
    out = "".join(pieces(stream_of(tokenizer), [vocabulary[token] for token in tokens]))
    assert out.startswith("a;") and out.endswith("b more and")
    assert "�" in out


def test_special_and_hidden_tokens_do_not_show() -> None:
    tokenizer = byte_level()
    a, b = (tokenizer.encode(letter).ids[0] for letter in "ab")
    stream = DetokenizedStream(tokenizer, hidden=frozenset({b}))
    shown = [stream.push(token) for token in (tiny_models.BOS_ID, a, tiny_models.TURN_ID, b, a)]
    assert "".join(shown) + stream.finish() == tokenizer.decode([a, a])


def test_many_special_tokens_in_a_row_are_dropped() -> None:
    tokenizer = byte_level()
    stream = stream_of(tokenizer)
    assert {stream.push(tiny_models.TURN_ID) for _ in range(100)} == {""}
    assert stream.push(tokenizer.encode("a").ids[0]) == "a"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one twt three", ["two"], "one twt three"),
        ("aaab", ["aab"], "a"),
        ("ends with tw", ["two"], "ends with tw"),
        ("two at once", ["two"], ""),
        ("first of a pair", ["st of a", "rst"], "fi"),
        ("no stops", [""], "no stops"),
    ],
)
def test_text_is_cut_right_before_the_first_stop(text: str, stops: list[str], expected: str, size: int) -> None:
    strings = StopStrings(stops)
    out = [strings.push(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(out) + strings.finish() == expected
    assert bool(strings.reached) == (expected != text)


def test_the_possible_beginning_of_a_stop_is_held_and_then_released() -> None:
    strings = StopStrings(["</end>"])
    assert [strings.push("x <"), strings.push("/e"), strings.push("!"), strings.push("y")] == ["x ", "", "</e!", "y"]


def test_a_stop_may_be_part_of_the_text() -> None:
    strings = StopStrings(["two", "t"], kept=True)
    assert [strings.push("one t"), strings.push("wo three"), strings.finish()] == ["one t", "", ""]
    assert strings.reached == "t"


def test_no_stop_is_looked_for_in_the_first_tokens() -> None:
    tokenizer = byte_level()
    ids = [token for word in ("a", "b", "a", "b") for token in tokenizer.encode(word).ids]
    for after, expected in ((0, "a"), (1, "a"), (2, "aba"), (9, "abab")):
        stream = DetokenizedStream(tokenizer, stops=StopStrings(["b"]), after=after)
        assert "".join(pieces(stream, ids)) == expected
        assert bool(stream.stopped) is (after < 9)


def test_nothing_follows_a_stop() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("one two three").ids
    stream = stream_of(tokenizer, stop=["two"])
    assert "".join(pieces(stream, ids)) == "one "
    assert stream.stopped == "two"


def test_a_stop_that_only_the_last_held_text_completes_is_met() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🙄").ids[:-1]
    stream = stream_of(tokenizer, stop=["\N{REPLACEMENT CHARACTER}"])
    assert "".join(pieces(stream, ids)) == "a"
    assert stream.stopped
