"""jinja2's immutable sandbox, for chat templates that minijinja cannot parse. Owns its setup and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ("TemplateError", "compile_jinja2")


def compile_jinja2(
    text: str, helpers: Mapping[str, Callable[..., Any]], tojson: Callable[..., str]
) -> Callable[[Mapping[str, Any]], str]:
    """`helpers` are what the template may call. Raises TemplateError for what it cannot parse."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(dict[str, Any](helpers))
    template = environment.from_string(text)
    return lambda context: template.render(**context)


class _Generation(Extension):
    """`{% generation %}` marks what a trainer learns from; for a prompt it is its content."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
