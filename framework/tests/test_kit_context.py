"""What the kits hand to components: contexts, the tiny tokenizer, the table model and its KV."""

from __future__ import annotations

import pytest

from pluglm.kernel.errors import ConfigError, PluginError
from pluglm.testing.batches import grow
from pluglm.testing.context import make_context, resolve_component, small_spec
from pluglm.testing.runner import TableRunner
from pluglm.testing.tokenizers import TinyTokenizer


@pytest.mark.parametrize("text", ["yes then", "", "Grüße, 世界!", "\x00\t\n  a"])
def test_the_tokenizer_gives_every_text_back(text: str) -> None:
    tokenizer = TinyTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_merges_and_ends() -> None:
    tokenizer = TinyTokenizer()
    assert len(tokenizer.encode("yes")) == 1
    assert tokenizer.eos_token_ids == {tokenizer.vocab_size - 1}
    assert "<|end|>" in tokenizer.to_json()


def test_a_context_takes_any_field_and_fits_the_rest_to_it() -> None:
    context = make_context(spec=small_spec(17, num_layers=1, num_kv_heads=1), max_num_seqs=9)
    assert (context.spec.vocab_size, context.max_num_seqs, context.deterministic) == (17, 9, False)
    assert context.bytes_per_token == 2 * 1 * 8 * 4  # key and value, one head of 8, float32
    assert context.kv_bytes == 192 * context.bytes_per_token


def test_components_are_resolved_as_the_kernel_does() -> None:
    cls, config = resolve_component("kv", "paged", {"block_size": 8})
    assert (cls.__name__, config.model_dump()["block_size"]) == ("PagedKV", 8)
    with pytest.raises(PluginError, match="did you mean 'paged'"):
        resolve_component("kv", "pagd", {})
    with pytest.raises(ConfigError, match="unknown key, did you mean 'block_size'"):
        resolve_component("kv", "paged", {"block_sise": 8})


def best(runner: TableRunner, sequence_id: int, tokens: list[int], num_computed: int = 0) -> int:
    grow(runner.kv, sequence_id, num_computed + len(tokens))
    return int(runner.run(runner.make_input([(sequence_id, tokens, num_computed)]))[-1].argmax())


def test_the_table_model_continues_from_its_kv() -> None:
    runner = TableRunner()
    best(runner, 1, [5, 6, 7, 8, 9])
    assert best(runner, 1, [4], 5) == best(TableRunner(), 1, [5, 6, 7, 8, 9, 4])


def test_the_table_model_notices_a_wrong_token_in_its_kv() -> None:
    answers = {best(TableRunner(), 1, [first, 6, 7, 8, 9, 4]) for first in range(40)}
    assert len(answers) > 30  # equal by chance only
    assert max(answers) < TinyTokenizer().vocab_size


def test_the_table_model_copies_blocks_before_it_writes() -> None:
    from dataclasses import replace

    runner = TableRunner()
    best(runner, 1, [5, 6])
    transaction = runner.kv.transaction()
    transaction.fork(1, 2)
    transaction.extend(2, 3)
    copies = transaction.commit()
    assert len(copies) == 1
    child = runner.run(replace(runner.make_input([(2, [9], 2)]), copies=copies))
    assert int(child[-1].argmax()) == best(TableRunner(), 1, [5, 6, 9])
    assert best(runner, 1, [7], 2) == best(TableRunner(), 1, [5, 6, 7])
