"""Renders a checkpoint's chat template. Owns the choice of engine, minijinja's setup and what a template may call; owns
no template and no tokenizer.

A template is code from a file that anybody may have made. It runs in minijinja with a budget of steps, over deep copies
of plain JSON values. Only what minijinja cannot parse goes to jinja2's immutable sandbox (template_jinja2.py), which
has no budget. No template is ever taken from a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import minijinja

from proa.errors import RequestError

FUEL = 1_000_000
"""Steps that one rendering may take in minijinja; a conversation of 1,000 messages takes about 40,000."""

_NAME = "chat_template"
_Render = Callable[[Mapping[str, Any]], str]


class TemplateRefusal(Exception):
    """A template called raise_exception: the conversation does not suit the model."""


class ChatTemplate:
    """`where` names the checkpoint in messages; `bos_token`, `eos_token` are the texts that the template may write."""

    def __init__(self, text: str, bos_token: str | None, eos_token: str | None, where: str = "the model") -> None:
        self._where = where
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        self._render, self.engine = self._compile(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. `variables` are further names that a template may know, such as
        `enable_thinking`."""
        context = {
            **plain(variables or {}),
            "messages": [_message(message) for message in messages],
            "tools": plain(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
        }
        try:
            return self._render(context)
        except RequestError:
            raise
        except TemplateRefusal as refusal:
            raise self._error(f"the chat template of {self._where} refuses this conversation: {refusal}.") from refusal
        except Exception as error:  # a template is foreign code: whatever it raises is its failure
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise self._error(f"the chat template of {self._where} failed: {reason}.") from error

    def _compile(self, text: str) -> tuple[_Render, str]:
        """The first engine that can read the template. With none, rendering is refused, not the model as a whole."""
        try:
            return compile_minijinja(text), "minijinja"
        except minijinja.TemplateError:
            pass
        from proa.engine import template_jinja2  # 14 ms of import for the few templates that need it

        try:
            return template_jinja2.compile_jinja2(text, dict(HELPERS), tojson), "jinja2"
        except (template_jinja2.TemplateError, RecursionError) as error:
            return self._refuser(f"the chat template of {self._where} cannot be read: {error}."), "none"

    def _refuser(self, message: str) -> _Render:
        def refuse(context: Mapping[str, Any]) -> str:
            raise self._error(message)

        return refuse

    def _error(self, message: str) -> RequestError:
        return RequestError("request/template", message)


def compile_minijinja(text: str) -> _Render:
    """Raises minijinja.TemplateError for what it cannot parse."""
    environment = minijinja.Environment(fuel=FUEL, trim_blocks=True, lstrip_blocks=True)
    environment.add_filter("tojson", tojson)
    for name, helper in HELPERS:
        environment.add_global(name, helper)
    environment.add_template(_NAME, text)
    return lambda context: environment.render_template(_NAME, **context)


def plain(value: Any) -> Any:
    """A deep copy that holds nothing but JSON values, so that a template can neither call nor change anything."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("request/messages", f"messages and tools must be plain JSON values: {error}.") from error


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A key that is null counts as absent: clients send `"tool_calls": null`, and templates ask `is defined`."""
    copied = plain(dict(message))
    return {key: value for key, value in copied.items() if value is not None}


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without the HTML escapes that both engines' own filters add."""
    parts = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=parts, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise TemplateRefusal(message)


def strftime_now(form: str) -> str:
    """The local time; some templates write today's date."""
    return datetime.now().astimezone().strftime(form)


HELPERS = (("raise_exception", raise_exception), ("strftime_now", strftime_now))
