"""The parser of one verb. Settings are generated from config/fields.py and stay text, so that config/load.py alone
reads values and words errors; verbs add their own options to the same parser.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from proa.config.fields import KEYS, Key, Scope, flag_name, nearest
from proa.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Refuses in the house form; no flag may be abbreviated."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError("config/command-line", f"{message}.", hint=f"{self.prog} --help")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all of `arguments`; positional arguments may stand between options."""
        args, rest = self.parse_known_intermixed_args(arguments)
        for word in rest:
            if word.startswith("-") and word != "-":
                name = word.partition("=")[0]
                hint = nearest(name, self._option_string_actions)
                raise ConfigError("config/unknown-flag", f"unknown flag {name}.", hint=hint or f"{self.prog} --help")
        if rest:
            raise ConfigError("config/command-line", f"unexpected argument {rest[0]!r}.", hint=f"{self.prog} --help")
        return args


class _Remember(argparse.Action):
    """Keeps every text of a setting under the flag as typed, in `namespace.flags`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        namespace.flags = {**namespace.flags, flag: [*namespace.flags.get(flag, []), values]}


def add_general(parser: argparse.ArgumentParser) -> None:
    """Options of every verb."""
    parser.add_argument("--json", action="store_true", help="machine-readable result on stdout")
    parser.add_argument("--debug", action="store_true", help="print a traceback with an error")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """MODEL's settings: every key of the intent, and the two options about the settings file."""
    parser.set_defaults(flags={})
    files = parser.add_argument_group("settings file")
    files.add_argument("--config", type=Path, metavar="FILE", help="read settings from this TOML file")
    files.add_argument("--dump-config", action="store_true", help="print the merged settings with origins, and stop")
    for title, note, keys in (
        ("settings", "", [key for key in KEYS if key.field.scope is not Scope.RUNNER]),
        (
            "settings of each runner",
            "For one runner only: --target.KEY or --draft.KEY, such as --draft.dtype.",
            [key for key in KEYS if key.field.scope is Scope.RUNNER],
        ),
    ):
        group = parser.add_argument_group(title, note)
        for key in keys:
            _add_key(group, key)


def setting_flags(key: Key) -> tuple[str, ...]:
    """The flags of one setting, the documented one first: the shortest."""
    return tuple(sorted(map(flag_name, key.spellings), key=len))


def _add_key(group: argparse._ArgumentGroup, key: Key) -> None:  # pyright: ignore[reportPrivateUsage] - it has no public name
    text = key.field.help if key.role is None else argparse.SUPPRESS
    group.add_argument(
        *setting_flags(key), action=_Remember, metavar=key.field.kind.metavar, default=argparse.SUPPRESS, help=text
    )
