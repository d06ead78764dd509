"""The intent as a TOML file that `--config` reads back to the same values. Owns the text only."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from proa.choice import OriginSource
from proa.config.fields import KEYS
from proa.config.intent import EngineConfig


def to_toml(config: EngineConfig) -> str:
    """One line per leaf with its origin; leaves that nobody asked for are commented out. What was asked of all phases
    at once stays one line: a runner's own default goes before it, and not before what was asked of one phase."""
    names = {key.leaves[0]: key.dotted for key in KEYS if len(key.leaves) == 1}
    bases = {leaf: key.spellings[-1] for key in KEYS if key.role and len(key.leaves) > 1 for leaf in key.leaves}
    lines = [f"# MODEL = {_literal(config.model)}"]
    for path, choice in config.leaves():
        if path in names:
            asked = choice.origin.source is not OriginSource.DEFAULT
            value = "auto" if choice.is_auto else choice.value
            line = f"{bases[path] if choice.origin.is_base else names[path]} = {_literal(value)}"
            lines.append(f"{line}  # {_comment(str(choice.origin))}" if asked else f"# {line}")
    return "\n".join(dict.fromkeys(lines))


def _literal(value: Any) -> str:
    """JSON's numbers, strings and arrays are TOML's, but for DEL in strings, which TOML wants escaped."""
    plain = value.value if isinstance(value, Enum) else value
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    """A file's name may hold anything; a comment must stay on its line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
