"""The demo's prompt is the beginning of a class, and both demo models close its last method with it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from disagg.demo.flow import MAX_TOKENS, METHOD_TOKENS, PROMPT, STOP

MODELS = Path(__file__).parents[2] / "disagg" / "demo" / "models"


@pytest.mark.parametrize("name", ["qwen3-moe-tiny", "gpt-oss-tiny"])
def test_both_models_complete_the_method_and_stop(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    tokens = torch.tensor([tokenizer.encode(PROMPT)])
    with torch.no_grad():
        longest = min(MAX_TOKENS, 64)
        output = model.generate(tokens, max_new_tokens=longest, do_sample=False, pad_token_id=0)
    answer = tokenizer.decode(output[0][tokens.shape[1] :])
    ends = [place for stop in STOP if (place := answer.find(stop)) >= 0]
    assert ends, "no stop string ends the answer"
    (context,) = ast.parse(PROMPT + answer[: min(ends)]).body
    assert isinstance(context, ast.ClassDef)
    assert ast.unparse(context.body[-1]).endswith("return a.is_subnormal(context=self)")
    assert tokenizer.decode(output[0][tokens.shape[1] :][:METHOD_TOKENS]).rstrip() == answer[: min(ends)]
