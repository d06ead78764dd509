"""Chat templates: equal in both engines, bounded, and unable to touch anything."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jinja2
import minijinja
import pytest

from proa.engine.template import HELPERS, ChatTemplate, TemplateRefusal, compile_minijinja, tojson
from proa.engine.template_jinja2 import compile_jinja2
from proa.errors import RequestError

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == 'user' %}
        {%- set ns.last = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {{- ('<|im_end|>' if loop.index0 >= ns.last else '') + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls | length != 1 %}
        {{- raise_exception("only one tool call at a time") }}
    {%- endif %}
    {%- if not message.content is defined %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
INST = """{{ bos_token -}}
{% set offset = 1 if messages[0]['role'] == 'system' else 0 %}
{% for message in messages[offset:] %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('After the optional system message, roles must alternate user/assistant/user/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- '[INST] ' }}
        {%- if loop.last and offset %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}
        {{- message['content'] + ' [/INST]' -}}
    {% elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim ~ eos_token -}}
    {% endif %}
{% endfor %}
"""

USER = {"role": "user", "content": "  Wie geht's? <b>&'\"é 👋\n"}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
REPLY = {"role": "assistant", "content": "<think>hm</think>\nGut."}
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, None], "ü": "<&>"}}}],
}
RESULT = {"role": "tool", "content": '{"ok": true}'}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "it's <é>", "parameters": {"x": 1, "a": {"b": []}}},
}
TALKS = ([USER], [SYSTEM, USER], [SYSTEM, USER, REPLY, USER], [USER, CALL, RESULT, USER], [USER, USER])


def in_sandbox(text: str) -> Any:
    return compile_jinja2(text, dict(HELPERS), tojson)


def outcome(render: Any, context: dict[str, Any]) -> str:
    try:
        return render(context)
    except (TemplateRefusal, jinja2.UndefinedError, minijinja.TemplateError) as error:
        return f"refused: {error}" if isinstance(error, TemplateRefusal) else "failed"


@pytest.mark.parametrize("template", [CHATML, HEADERS, INST], ids=["chatml", "headers", "inst"])
@pytest.mark.parametrize("talk", TALKS, ids=range(len(TALKS)))
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("more", [{}, {"enable_thinking": False}], ids=["", "brief"])
def test_realistic_templates_render_equal_in_both_engines(
    template: str, talk: list[Any], tools: Any, more: dict[str, Any]
) -> None:
    for prompt in (True, False):
        context = {"messages": talk, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        context |= {"bos_token": "<s>", "eos_token": "</s>", **more}
        first, second = (outcome(compiled(template), context) for compiled in (compile_minijinja, in_sandbox))
        assert first == second
        assert first != "failed"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "<|im_start|>system\nBe brief.\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (
            HEADERS,
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (INST, "<s>[INST] Be brief.\n\n\nHi [/INST]"),
    ],
    ids=["chatml", "headers", "inst"],
)
def test_a_short_conversation_becomes_the_prompt_that_the_format_prescribes(template: str, text: str) -> None:
    rendered = ChatTemplate(template, "<s>", "</s>").render([SYSTEM, {"role": "user", "content": "Hi"}])
    assert rendered == text


def test_json_is_written_as_it_is_and_not_escaped_for_html() -> None:
    template = ChatTemplate("{{ tools[0] | tojson }}|{{ tools[0] | tojson(indent=1) }}", None, None)
    assert (
        template.render([], tools=[TOOL])
        == f"{json.dumps(TOOL, ensure_ascii=False)}|{json.dumps(TOOL, ensure_ascii=False, indent=1)}"
    )


def test_further_variables_reach_the_template_but_never_replace_the_conversation() -> None:
    template = ChatTemplate("{{ mood }} {{ messages | length }} {{ bos_token }}", "<s>", None)
    assert template.render([USER], variables={"mood": "calm", "messages": [], "bos_token": "x"}) == "calm 1 <s>"


def test_keys_that_are_null_count_as_absent() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls is defined }}", None, None)
    assert template.render([{**USER, "tool_calls": None}]).lower() == "false"


def test_a_refusal_of_the_template_is_told_in_its_words() -> None:
    with pytest.raises(RequestError, match="of tiny refuses this conversation: .*roles must alternate") as caught:
        ChatTemplate(INST, "<s>", "</s>", where="tiny").render([USER, USER])
    assert caught.value.slug == "request/template"


def test_what_only_jinja2_can_read_is_rendered_by_its_sandbox() -> None:
    template = ChatTemplate("{% generation %}{{ messages[0].role }}{% endgeneration %}", None, None)
    assert (template.engine, template.render([USER])) == ("jinja2", "user")


@pytest.mark.parametrize("text", ["{% if %}", "{{ 'a", "{% nonsense %}"])
def test_a_template_that_no_engine_can_read_refuses_conversations_and_not_the_model(text: str) -> None:
    template = ChatTemplate(text, None, None)
    with pytest.raises(RequestError, match="of the model cannot be read"):
        template.render([USER])


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 500000000 }}",
        "{% for i in range(20000) %}{% for j in range(20000) %}x{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(1000000000) | list }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages | nosuchfilter }}",
        "{{ strftime_now(3) }}",
    ],
)
def test_a_template_that_costs_too_much_or_fails_is_an_error_of_the_request(text: str) -> None:
    with pytest.raises(RequestError, match="the chat template of the model failed") as caught:
        ChatTemplate(text, None, None).render([USER])
    assert caught.value.slug == "request/template"


@pytest.mark.parametrize("wrap", ["{%s}", "{%% generation %%}{%s}{%% endgeneration %%}"], ids=["minijinja", "jinja2"])
@pytest.mark.parametrize(
    "payload",
    [
        "{ messages.__class__.__mro__ }",
        "{ ''.__class__.__base__.__subclasses__() }",
        "{ raise_exception.__globals__ }",
        "{ strftime_now.__globals__['json'] }",
        "{ '{0.__class__}'.format(messages) }",
    ],
)
def test_the_interpreter_is_out_of_reach(wrap: str, payload: str) -> None:
    template = ChatTemplate(wrap % payload, None, None)
    try:
        text = template.render([USER])
    except RequestError:
        return
    assert "class" not in text
    assert "module" not in text


@pytest.mark.parametrize("wrap", ["{%s}", "{%% generation %%}{%s}{%% endgeneration %%}"], ids=["minijinja", "jinja2"])
def test_a_template_cannot_change_the_callers_messages(wrap: str) -> None:
    messages = [dict(USER)]
    template = ChatTemplate(wrap % "{ messages.append({'role': 'system'}) }", None, None)
    with contextlib.suppress(RequestError):
        template.render(messages)
    assert messages == [USER]


def test_an_object_that_is_no_plain_value_is_refused() -> None:
    class Opener:
        def read(self) -> str:
            raise RuntimeError("called")

    with pytest.raises(RequestError, match="plain JSON values") as caught:
        ChatTemplate("{{ messages[0].content.read() }}", None, None).render([{"role": "user", "content": Opener()}])
    assert caught.value.slug == "request/messages"


def test_todays_date_can_be_written() -> None:
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", None, None).render([])
    assert len(text) == 10
    assert text.startswith("2")
