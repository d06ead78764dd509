"""Flags of `proa run` for the fields of SamplingParams. Owns spellings and help; SamplingParams checks the values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """`read` turns the text into a value; None makes a switch. A repeatable flag collects a list."""

    field: str
    read: Callable[[str], Any] | None
    metavar: str
    help: str
    name: str = ""
    is_repeatable: bool = False


def _count_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


FLAGS = (
    Flag("temperature", float, "T", "0: greedy (default: the checkpoint's, else 1)"),
    Flag("top_p", float, "P", "keep the likeliest tokens up to this mass"),
    Flag("top_k", int, "K", "keep the K likeliest tokens; 0: all"),
    Flag("min_p", float, "P", "drop tokens less likely than this share of the likeliest"),
    Flag("max_tokens", _count_or_none, "N", "longest answer; none: until the context is full (default: 512)"),
    Flag("min_tokens", int, "N", "no end of text before this many tokens"),
    Flag("seed", int, "S", "makes a sampled answer repeatable (default: a fresh one)"),
    Flag("stop", str, "TEXT", "end the answer at this text (repeatable)", is_repeatable=True),
    Flag("stop_token_ids", int, "ID", "end the answer at this token (repeatable)", "--stop-token-id", True),
    Flag("presence_penalty", float, "X", "subtract X from the logits of tokens in the answer"),
    Flag("frequency_penalty", float, "X", "subtract X per occurrence in the answer"),
    Flag("repetition_penalty", float, "X", "divide the logits of tokens in prompt and answer by X"),
    Flag("bad_words", str, "TEXT", "never say this (repeatable)", "--bad-word", True),
    Flag("ignore_eos", None, "", "go on after the end of text"),
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for flag in FLAGS:
        name = flag.name or "--" + flag.field.replace("_", "-")
        # A flag that is not given leaves no attribute, so that "none" can be a value.
        shared: dict[str, Any] = {"dest": flag.field, "default": argparse.SUPPRESS, "help": flag.help}
        if flag.read is None:
            group.add_argument(name, action="store_true", **shared)
        else:
            action = "append" if flag.is_repeatable else "store"
            group.add_argument(name, action=action, type=flag.read, metavar=flag.metavar, **shared)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that the command line gives."""
    return {flag.field: getattr(args, flag.field) for flag in FLAGS if hasattr(args, flag.field)}
