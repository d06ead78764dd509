"""The generated parser: every setting is a flag, no flag is guessed, the list of flags is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proa.cli.args import Parser, add_general, add_settings
from proa.config.fields import KEYS
from proa.config.load import load_config
from proa.errors import ConfigError

FROZEN = Path(__file__).parents[2] / "golden" / "flags.txt"


def parser() -> Parser:
    made = Parser("proa explain", "test")
    made.add_argument("model", metavar="MODEL")
    made.add_argument("prompt", nargs="?")
    made.add_argument("--why")
    add_general(made)
    add_settings(made)
    return made


def flags_of(*arguments: str) -> dict[str, Any]:
    return parser().read(["m", *arguments]).flags


def refused(*arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parser().read(arguments)
    return caught.value


def test_the_common_flags_are_those_of_the_frozen_list() -> None:
    made = Parser("proa", "test")
    add_general(made)
    add_settings(made)
    spelled = {flag for action in made._actions for flag in action.option_strings}
    assert sorted(spelled) == FROZEN.read_text().splitlines(), "a flag came or went: edit tests/golden/flags.txt"


def test_every_setting_is_a_flag_that_keeps_its_text_and_its_spelling() -> None:
    for key in KEYS:
        flag = "--" + key.dotted.replace("_", "-")
        assert flags_of(flag, "auto") == {flag: ["auto"]}
        assert flags_of(f"{flag}=auto") == {flag: ["auto"]}


def test_what_the_parser_keeps_is_what_the_intent_reads() -> None:
    flags = flags_of(
        "--draft", "small", "--allow-unexpected", "a", "--allow-unexpected=b", "--threads=1", "--threads=2"
    )
    config = load_config("m", flags=flags, file=None, environ={}, api={})
    assert config.draft.path.value == "small"
    assert config.load.allow_unexpected.value == ("a", "b")
    assert config.host.threads.value == 2


def test_two_parses_share_nothing() -> None:
    made = parser()
    assert made.read(["m", "--dtype", "float32"]).flags == {"--dtype": ["float32"]}
    assert made.read(["m"]).flags == {}


@pytest.mark.parametrize(
    "arguments",
    [["m", "--dtype", "float32", "hello"], ["--dtype", "float32", "m", "hello"], ["m", "hello", "--dtype", "float32"]],
)
def test_positional_arguments_may_stand_between_options(arguments: list[str]) -> None:
    args = parser().read(arguments)
    assert (args.model, args.prompt) == ("m", "hello")


def test_after_two_dashes_nothing_is_a_flag() -> None:
    assert parser().read(["m", "--", "--dtype"]).prompt == "--dtype"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--dtyp", "--dtype"),
        ("--draft-dtype", "--draft.dtype"),
        ("--linear-attention-decode", "--linear-attention.decode"),
        ("--max_num_seqs", "--max-num-seqs"),
        ("--wyh", "--why"),
        ("--draft.threads=3", "--threads is a setting of the whole engine"),
        ("--deb", "--debug"),
    ],
)
def test_an_unknown_or_abbreviated_flag_is_refused_with_what_was_meant(typed: str, meant: str) -> None:
    error = refused("m", typed)
    assert error.slug == "config/unknown-flag"
    assert typed.partition("=")[0] in error.message
    assert meant in (error.hint or "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "MODEL"),
        (["m", "--threads"], "--threads"),
        (["m", "a", "b"], "'b'"),
        (["m", "--json=1"], "--json"),
    ],
)
def test_the_parsers_own_errors_come_in_the_house_form(arguments: list[str], says: str) -> None:
    error = refused(*arguments)
    assert str(error).startswith("ConfigError [config/command-line]: ")
    assert says in error.message
    assert error.hint == "proa explain --help"


def test_help_shows_each_setting_once_with_its_choices_and_how_to_name_a_runner() -> None:
    text = parser().format_help()
    assert "auto|float32|bfloat16" in text
    assert "--target.KEY" in text
    assert "--target.dtype" not in text
    for key in KEYS:
        if key.role is None:
            assert key.field.help.split()[0] in text
