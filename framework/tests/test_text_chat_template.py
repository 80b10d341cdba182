"""Chat prompts equal those of transformers' apply_chat_template; failures and escapes are refused in one line."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from pluglm.kernel.errors import RequestError, TokenizerError
from pluglm.text.chat_template import ChatTemplate, render_chat
from pluglm.text.load import load_tokenizer
from pluglm.text.tokenizer import Tokenizer
from pluglm.weights.open import open_checkpoint
from pluglm.weights.packaged import smollm2_135m_instruct

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- if loop.last and add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
{% endfor %}"""
LLAMA3 = """{{- bos_token }}
{%- if not date is defined %}{% set date = strftime_now("%Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date + "\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- {"call": message.tool_calls, "sign": "<é>"} | tojson }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}
{%- set ns = namespace(turns=0) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {%- set ns.turns = ns.turns + 1 -%}
    {%- generation -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
    {%- endgeneration -%}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
{{ ns.turns }} {{ dict(a=1) }} {{ undefined_name }}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA}
USER = {"role": "user", "content": "  Hi <b>\n there<|im_end|> é{{ 1 }} "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "three turns": [USER, {"role": "assistant", "content": "Yes.", "extra": None}, {"role": "user", "content": ""}],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
}


def backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE(vocab={"<bos>": 0, "<eos>": 1}, merges=[]))


def ours(template: str | None) -> Tokenizer:
    return Tokenizer(backend(), source="tiny", special_tokens=SPECIAL, chat_template=template)


def theirs(template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend(), chat_template=template, **SPECIAL)


PAIRS = [(name, chat) for name in TEMPLATES for chat in CHATS if (name, chat) != ("gemma", "system")]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(("name", "chat"), PAIRS)
def test_prompts_equal_transformers(name: str, chat: str, prompt: bool) -> None:
    expected = theirs(TEMPLATES[name]).apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=prompt)
    assert render_chat(ours(TEMPLATES[name]), CHATS[chat], add_generation_prompt=prompt) == expected


def test_tools_calls_and_variables_equal_transformers() -> None:
    call: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"name": "f", "arguments": {"x": [1, 2.5, True]}}],
    }
    tools = [{"type": "function", "function": {"name": "f", "description": "a < b & 'c'"}}]
    chat: list[dict[str, Any]] = [USER, call, {"role": "tool", "content": "3"}]
    options: dict[str, Any] = {"tools": tools, "date": "1 May"}
    expected = theirs(LLAMA3).apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
    assert render_chat(ours(LLAMA3), chat, add_generation_prompt=True, **options) == expected
    assert "1 May" in expected


def test_smollm2s_own_template_equals_transformers() -> None:
    checkpoint = open_checkpoint(smollm2_135m_instruct())
    tokenizer = load_tokenizer(checkpoint)
    checkpoint.close()
    reference = theirs(tokenizer.chat_template or "")
    for chat in CHATS.values():
        expected = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert render_chat(tokenizer, chat, add_generation_prompt=True) == expected


def test_strftime_now_is_the_local_time() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m') }}", source="tiny")
    before = datetime.now()
    rendered = template.render([USER], add_generation_prompt=False)
    assert rendered in {before.strftime("%Y-%m"), datetime.now().strftime("%Y-%m")}


FAILURES = {
    "syntax": ("{% for %}", "does not compile at line 1"),
    "unknown tag": ("{% include 'x' %}", "failed"),
    "raise": ("{{ raise_exception('Roles must\nalternate') }}", "failed on these messages: Roles must alternate"),
    "undefined": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "type": ("{{ 1 + 'a' }}", "unsupported operand"),
    "division": ("{{ 1 // 0 }}", "failed on these messages"),
    "range": ("{% for i in range(10 ** 9) %}{% endfor %}", "failed on these messages"),
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x",
        "takes more than 1000000 loop turns",
    ),
    "doubling macros": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
        "takes more than 1000000 loop turns and calls",
    ),
    "a recursive loop": (
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 90 }}{% endfor %}",
        "takes more than 1000000 loop turns and calls",
    ),
    "a loop that writes": (
        "{% for i in range(100) %}{{ 'x' * 999999 }}{% endfor %}",
        "writes more than 16000000 characters",
    ),
    "a long product": ("{{ 'x' * 10 ** 11 }}", "a product of 1 and 100000000000 is too long"),
    "a long list": ("{{ 10 ** 9 * [1] }}", "a product of 1 and 1000000000 is too long"),
    "a power": ("{{ 9 ** 99999999 }}", "the power 99999999 is too large"),
    "lipsum": ("{{ lipsum(n=10 ** 7) }}", "'lipsum' is undefined"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "failed on these messages"),
}
ESCAPES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ('{0.__class__}'|string).format_map({'0': 1}) }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ (messages|map(attribute='__class__')|first).mro() }}",
)


LOOPS = (
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex }},{% endfor %}",
    "{% for a, b in [(1, 2), (3, 4)] if a > 1 %}{{ a }}{{ b }}{{ loop.nextitem }}{% else %}none{% endfor %}",
    "{% for a in [] %}{{ a }}{% else %}none{% endfor %}",
    "{% for key, value in {'x': 1, 'y': 2}.items() %}{{ loop.previtem }}{{ key }}{{ loop.cycle('o') }}{% endfor %}",
    "{% for n in [[1], [2, 3]] recursive %}{{ n if n is number else loop(n) }}{{ loop.depth }};{% endfor %}",
    "{% for a in range(9) %}{% if a == 3 %}{% continue %}{% elif a == 6 %}{% break %}{% endif %}{{ a }}{% endfor %}",
    "{{ 3 * 'ab' }}{{ 2 ** 10 }}{{ 2.0 ** 3 }}{{ 'x' * -1 }}{% for c in 'abc' %}{{ c * 2 }}{% endfor %}",
)


@pytest.mark.parametrize("template", LOOPS)
def test_counting_changes_nothing_about_a_loop(template: str) -> None:
    expected = theirs(template).apply_chat_template([USER, USER], tokenize=False)
    assert render_chat(ours(template), [USER, USER], add_generation_prompt=False) == expected


def test_every_render_has_the_whole_budget() -> None:
    template = "{% for i in range(6) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    for _ in range(2):
        assert render_chat(ours(template), [USER], add_generation_prompt=False) == "x"


@pytest.mark.parametrize("failure", sorted(FAILURES))
def test_a_failing_template_is_reported_in_one_line(failure: str) -> None:
    template, message = FAILURES[failure]
    with pytest.raises(TokenizerError, match=message) as caught:
        render_chat(ours(template), [USER], add_generation_prompt=True)
    assert str(caught.value).startswith("tiny: the chat template ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ESCAPES)
def test_the_sandbox_holds(template: str) -> None:
    """An escape is refused, or what it reached for is undefined and prints as nothing."""
    rendered = ""
    with suppress(TokenizerError):
        rendered = render_chat(ours(template), [USER], add_generation_prompt=True)
    assert rendered == ""


def test_a_refusing_template_equals_the_refusal_of_transformers() -> None:
    chat = CHATS["system"]
    with pytest.raises(Exception, match="System role not supported"):
        theirs(GEMMA).apply_chat_template(chat, tokenize=False)
    with pytest.raises(TokenizerError, match="System role not supported"):
        render_chat(ours(GEMMA), chat, add_generation_prompt=False)


def test_a_template_cannot_change_the_callers_messages() -> None:
    message = {"role": "user", "content": "x", "tags": ["a"]}
    with pytest.raises(TokenizerError):
        render_chat(ours("{{ messages[0].tags.append('b') }}"), [message], add_generation_prompt=False)
    assert message == {"role": "user", "content": "x", "tags": ["a"]}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list"),
        ("hi", "messages must be a list"),
        ({"role": "user", "content": "x"}, "messages must be a list"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role is ''"),
        ([USER, {"role": 3, "content": "x"}], r"messages\[1\].role is 3"),
        ([{"role": "user"}], r"messages\[0\] has no .content.; it has role"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content is a list"),
        ([{"role": "user", "content": "x", "file": Path("x")}], r"messages\[0\].file is a .*Path; only JSON"),
        ([{"role": "user", "content": "x", "deep": nested(5000)}], "nested deeper than 100 levels"),
    ],
)
def test_wrong_messages_are_a_request_error(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render_chat(ours(CHATML), messages, add_generation_prompt=True)
    assert "\n" not in str(caught.value)


def test_wrong_variables_are_a_request_error() -> None:
    with pytest.raises(RequestError, match="template variable 'messages'"):
        render_chat(ours(CHATML), [USER], add_generation_prompt=True, messages=[])
    with pytest.raises(RequestError, match="template variable 'run' is a function; only JSON values"):
        render_chat(ours(CHATML), [USER], add_generation_prompt=True, run=lambda: 0)


def test_a_tokenizer_without_a_template_says_what_to_do() -> None:
    with pytest.raises(TokenizerError, match=r"^tiny: has no chat template; send a plain prompt"):
        render_chat(ours(None), [USER], add_generation_prompt=True)
