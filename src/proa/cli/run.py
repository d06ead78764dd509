"""`proa run`: one streamed answer, or a chat. stdout carries the answer alone, stderr the closing line."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from proa.cli.output import Output
from proa.cli.sampling_flags import add_sampling_flags, given_sampling
from proa.config.intent import EngineConfig
from proa.units import Phase

if TYPE_CHECKING:
    from proa.engine.results import RequestOutput
    from proa.llm import LLM, Stream
    from proa.sampling.params import SamplingParams

Messages = list[dict[str, Any]]
LONGEST_ANSWER = 512
MOST_POSITIONS = 8
RUNNER_KNOBS = ("dtype", "quantization", "shared_experts", "moe_kernel", "matmul_kernel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the question; without it a chat starts")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the first question")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT as text, without the chat template")
    add_sampling_flags(parser)


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    from proa.cli.loading import open_llm

    with collector_at_rest():
        llm = open_llm(config, out)
    with llm:
        params = llm.default_params(**{"max_tokens": LONGEST_ANSWER, **given_sampling(args)})
        conversation = Conversation(llm, params, system=args.system, raw=args.raw or not llm.has_chat_template)
        if args.prompt is not None:
            answer_once(conversation, args.prompt, out, as_json=args.json)
        else:
            chat(conversation, out)
    return 0


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No cyclic garbage collection while modules and vocabularies come in, none over them afterwards.

    Start-up makes some 500,000 objects that live to the end. Looking through them again and again takes 0.25 s of it,
    and one such look in the middle of an answer 80 ms.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class Conversation:
    """The messages so far, or for a model without a template the text so far."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, raw: bool) -> None:
        self.llm = llm
        self.params = params
        self.is_raw = raw
        self.messages: Messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Stream:
        self.messages.append({"role": "user", "content": text})
        if self.is_raw:
            return self.llm.stream("".join(message["content"] for message in self.messages), self.params)
        return self.llm.stream(self.messages, self.params)

    def add_answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def answer_once(conversation: Conversation, prompt: str, out: Output, *, as_json: bool) -> None:
    stream = conversation.ask(prompt)
    for piece in stream:
        if not as_json:
            out.write(piece)
    output = stream.output()
    if as_json:
        out.json(asdict(output))
    else:
        out.line()
    close(conversation.llm, output, out)


def chat(conversation: Conversation, out: Output) -> None:
    """Turns until Ctrl-D or /quit; Ctrl-C stops the answer and keeps what was said."""
    last: RequestOutput | None = None
    if out.is_terminal:
        out.note("/quit or Ctrl-D ends, Ctrl-C stops an answer")
    for text in questions(out):
        stream = conversation.ask(text)
        said: list[str] = []
        try:
            for piece in stream:
                said.append(piece)
                out.write(piece)
        except KeyboardInterrupt:
            stream.close()
            out.note(" [stopped]")
        out.line()
        conversation.add_answer("".join(said))
        last = stream.output()
    if last is not None:
        close(conversation.llm, last, out)


def questions(out: Output) -> Iterator[str]:
    """Lines of stdin that say something. The prompt sign goes to a terminal only."""
    sign = ">>> " if out.is_terminal and sys.stdin.isatty() else ""
    if sign:
        enable_line_editing()
    while True:
        try:
            text = input(sign).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not sign:
                raise
            out.line()
            continue
        if text == "/quit":
            return
        if text:
            yield text


def enable_line_editing() -> None:
    """Importing readline gives `input` history and editing, where the platform has it."""
    import importlib.util

    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")


def close(llm: LLM, output: RequestOutput, out: Output) -> None:
    """What ran and what it was worth: with a draft model a line for each runner, then the closing line."""
    runners = {role: one for role, one in llm.explain()["runners"].items() if one is not None}
    if len(runners) > 1:
        for role, one in runners.items():
            out.note(runner_line(role, one))
    out.note(closing_line(llm, output))


def runner_line(role: str, runner: Any) -> str:
    """`draft (glm4_moe/nextn): dtype bfloat16, quantization none, shared_experts separate, matmul_kernel native`.

    Decisions that have nothing to decide in this runner are left out; phases with the same kernel are one.
    """
    values = {knob: decision["value"] for knob, decision in runner["decisions"].items()}
    attention = dict.fromkeys(values[f"attention.{phase.value}"] for phase in Phase)
    told = {knob: values[knob] for knob in RUNNER_KNOBS} | {"attention": " ".join(map(str, attention))}
    words = [f"{knob} {_short(value)}" for knob, value in told.items() if value is not None]
    return f"{role} ({runner['family']}): {', '.join(words)}"


def _short(value: Any) -> str:
    """A value that differs by layer is a mapping."""
    return " ".join(f"{layers}: {one}" for layers, one in value.items()) if isinstance(value, dict) else str(value)


def closing_line(llm: LLM, output: RequestOutput) -> str:
    """`64 tokens, 35.1 tok/s, accept length 2.31 (62% 41% 20%), ledger closed (272 tensors), plan 1a2b3c4d`."""
    metrics = output.metrics
    parts = [f"{metrics.num_output_tokens} tokens", f"{metrics.tokens_per_second:.1f} tok/s"]
    is_measured = False
    if llm.algorithm != "none":
        chosen = llm.stats()["draft_length"]
        is_measured = chosen["mode"] == "measured"
        parts += [acceptance(metrics.speculative_decoding), *(lengths(chosen) if is_measured else ())]
    runners = llm.ledger()["runners"]
    tensors = " + ".join(str(one["tensors"]["total"]) for one in runners.values() if one is not None)
    parts += [f"ledger closed ({tensors} tensors)", f"plan {llm.explain()['digest'][:8]}"]
    parts += [f"{role} costs {table.digest[:8]}" for role, table in llm.costs.items() if is_measured]
    return ", ".join(parts)


def acceptance(speculation: Any) -> str:
    """Accept length, then the acceptance rate of the 1st, 2nd, ... proposed token."""
    if not speculation or not speculation["num_drafts"]:
        return "accept length 1.00 (nothing proposed)"
    positions = speculation["acceptance_rate_per_position"]
    used = max((index for index, rate in enumerate(positions, start=1) if rate), default=1)
    rates = " ".join(f"{100 * rate:.0f}%" for rate in positions[: min(used, MOST_POSITIONS)])
    return f"accept length {speculation['mean_acceptance_length']:.2f} ({rates})"


def lengths(chosen: Any) -> list[str]:
    """Since the start: how long proposals were, where that follows from costs, and whether they paid."""
    if not sum(chosen["histogram"]):
        return []
    if not chosen["pays"]:
        return ["speculation does not pay here: plain decoding"]
    return [f"draft length {chosen['mean']:.1f} (0 to {chosen['longest']})"]
