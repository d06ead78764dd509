"""F25, F28-F32 and F34: kernels of linear attention, and of attention, in engines that were built. Each runner's are
those of its own plan, whoever was built before, after, or beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa import LLM, ConfigError, KernelUnavailable, SamplingParams
from tests.factories.headers import LAPTOP
from tests.factories.hybrid_checkpoints import HYBRID_FAMILIES
from tests.factories.hybrid_runners import write_tiny_hybrid
from tests.factories.native import probed, why_not
from tests.features.verbs import Verb, caps_file, decisions

WHY_NOT = why_not(probed())
with_native = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SETTINGS: Mapping[str, Any] = {
    "dtype": "float32", "threads": 1, "max_model_len": 256, "kv_memory": "8MiB", "prefix_cache": "off",
}  # fmt: skip
ALONE = {**SETTINGS, "speculative": "none"}
DRAFTED = {**SETTINGS, "speculative": "standalone", "num_draft_tokens": 3}
PHASES = ("prefill", "decode", "verify")
PROMPTS = [[10, 11, 12], [6 + j % 90 for j in range(70)]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
Write = Callable[[str], Path]
Calls = dict[str, Counter[str]]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Write:
    root = tmp_path_factory.mktemp("linear")

    def write(family: str) -> Path:
        return write_tiny_hybrid(family, root / family) if family in HYBRID_FAMILIES else tiny(family)

    return write


def calls_of(llm: LLM) -> Calls:
    """Calls so far by op and backend, of every runner."""
    return {role: Counter(calls) for role, calls in llm.stats()["kernel_calls"].items()}


def backends(calls: Mapping[str, int], op: str) -> dict[str, set[str]]:
    """Phase -> backends that were called."""
    found: dict[str, set[str]] = {}
    for key, count in calls.items():
        name, _, backend = key.partition("/")
        if count and name.startswith(f"{op}."):
            found.setdefault(name.removeprefix(f"{op}."), set()).add(backend)
    return found


def planned(llm: LLM, role: str, knob: str) -> dict[str, str | None]:
    found = decisions(llm.explain(), role)
    return {phase: found[f"{knob}.{phase}"]["value"] for phase in PHASES}


def only(names: Mapping[str, str | None], phases: Mapping[str, Any]) -> dict[str, set[str]]:
    """What `backends` gives if the plan is kept to; verified rows are applied again by the kernel of decode."""
    every = {**names, "replay": names["decode"]}
    return {phase: {name} for phase, name in every.items() if phase in phases and name is not None}


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def state(llm: LLM) -> tuple[str, Any, Any, Any]:
    """What must stay of a target: its plan's digest, its decisions, what was built, all calls."""
    runner = llm.explain()["runners"]["target"]
    return runner["digest"], runner["decisions"], llm.descriptions()["target"], calls_of(llm)["target"]


# F25, F28


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "kimi_linear"])
def test_f25_what_explain_says_of_each_phase_is_built_and_runs(family: str, write: Write, verb: Verb) -> None:
    words = ("--linear-attention.prefill", "torch", "--linear-attention.decode", "reference")
    said = decisions(verb("explain", write(family), *words, "--json").json)
    three = dict(zip(PHASES, ("torch", "reference", "reference"), strict=True))
    assert {phase: said[f"linear_attention.{phase}"]["value"] for phase in PHASES} == three
    with LLM(write(family), linear_attention={"prefill": "torch", "decode": "reference"}, **ALONE) as llm:
        answers(llm)
        built, promised = llm.descriptions()["target"]
        assert built == promised
        assert planned(llm, "target", "linear_attention") == three
        assert {phase: built[f"linear_attention.{phase}"] for phase in PHASES} == three
        assert backends(calls_of(llm)["target"], "delta") == {"prefill": {"torch"}, "decode": {"reference"}}


def test_f28_after_start_a_default_stands_as_auto_beside_the_kernel_that_runs(write: Write, verb: Verb) -> None:
    with LLM(write("qwen3_next"), linear_attention_decode="reference", **ALONE) as llm:
        answers(llm)
        found = decisions(llm.explain())
        used = backends(calls_of(llm)["target"], "delta")
    prefill, decode, verify = (found[f"linear_attention.{phase}"] for phase in PHASES)
    assert (decode["requested"], decode["value"], decode["source"]) == ("reference", "reference", "asked")
    for decision in (prefill, verify):
        assert decision["requested"] == "auto" and decision["source"] != "asked"
    assert used == {"prefill": {prefill["value"]}, "decode": {"reference"}}


def test_f28_a_dumped_intent_holds_what_was_asked_and_no_default(write: Write, gpu: Any, verb: Verb) -> None:
    dumped = verb("explain", write("qwen3_next"), "--linear-attention.decode", "reference", "--dump-config", *gpu).out
    asked = [line for line in dumped.splitlines() if "linear_attention" in line and not line.startswith("#")]
    assert len(asked) == 2 and all(".decode = " in line and '"reference"' in line for line in asked)  # of both runners


LINEAR_LAYERS = {"qwen3_next": 3, "kimi_linear": 4}  # of the tiny checkpoints (tests/factories)


def delta_calls(llm: LLM, role: str) -> dict[str, int]:
    return {key: count for key, count in calls_of(llm)[role].items() if key.startswith("delta.") and count}


@pytest.mark.parametrize("kernels", [("torch", "reference"), ("reference", "torch"), ("auto", "auto")])
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_f30_each_phase_counts_the_kernel_that_the_plan_names_and_no_other(
    family: str, kernels: tuple[str, str], write: Write
) -> None:
    asks = dict(zip(("linear_attention_prefill", "linear_attention_decode"), kernels, strict=True))
    with LLM(write(family), **ALONE, **asks, prefill_chunk=64) as llm:
        assert delta_calls(llm, "target") == {}
        llm.generate([PROMPTS[1]], PARAMS)
        names = planned(llm, "target", "linear_attention")
        # Of 70 tokens 64 are the first chunk; the second one's forward gives the first of 16 tokens.
        calls = {"prefill": 2 * LINEAR_LAYERS[family], "decode": 15 * LINEAR_LAYERS[family]}
        assert delta_calls(llm, "target") == {f"delta.{phase}/{names[phase]}": n for phase, n in calls.items()}


def test_f30_target_and_draft_count_their_own_forwards(write: Write) -> None:
    """A draft that is its target: each step accepts 3 tokens and adds one, so no row is ever replayed."""
    asks = {"target_linear_attention": "reference", "draft_linear_attention": "torch"}
    with LLM(write("qwen3_next"), draft=write("qwen3_next"), **DRAFTED, **asks) as llm:
        llm.generate([PROMPTS[1]], SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True))
        steps = llm.stats()["speculative_decoding"]["num_drafts"]
        target, draft = (delta_calls(llm, role) for role in ("target", "draft"))
    assert steps == 4
    layers = LINEAR_LAYERS["qwen3_next"]
    # One forward over the prompt, then one over anchor and 3 tokens in each step.
    assert target == {"delta.prefill/reference": layers, "delta.verify/reference": steps * layers}
    # The prompt; then three forwards per step. After a proposal the first one has the row of its last token beside the
    # anchor's.
    assert draft == {
        "delta.prefill/torch": layers,
        "delta.verify/torch": (steps - 1) * layers,
        "delta.decode/torch": (2 * steps + 1) * layers,
    }


# F29, F30, F34

PAIRS = (
    ("qwen3_next", "llama"),
    ("llama", "qwen3_5_text"),
    ("qwen3_next", "kimi_linear"),
    ("kimi_linear", "qwen3_next"),
)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_f29_a_second_runner_changes_neither_plan_nor_kernels_of_the_first(
    target: str, draft: str, write: Write
) -> None:
    """The first engine is open and has run when another with the same target and a draft is built, and runs."""
    other = {"draft_linear_attention": "torch"} if draft in HYBRID_FAMILIES else {}
    with LLM(write(target), **ALONE) as first:
        at_start = calls_of(first)["target"]
        said, after = answers(first), state(first)
        with LLM(write(target), draft=write(draft), **DRAFTED, **other) as second:
            assert state(first) == after
            assert answers(second) == said
            assert state(first) == after
            assert state(second)[0] == after[0]
            assert planned(second, "target", "linear_attention") == planned(first, "target", "linear_attention")
            for role in ("target", "draft"):
                used = backends(calls_of(second)[role], "delta")
                assert used == only(planned(second, role, "linear_attention"), used), role
                assert bool(used) == ((target if role == "target" else draft) in HYBRID_FAMILIES), role
        assert answers(first) == said
        assert calls_of(first)["target"] == after[3] + (after[3] - at_start)
        assert state(first)[:3] == after[:3]


def test_f30_both_runners_kernels_are_used_each_its_own(write: Write) -> None:
    asks = {
        "target_linear_attention": {"prefill": "torch", "decode": "reference"},
        "draft_linear_attention": {"prefill": "reference", "decode": "torch"},
    }
    with LLM(write("qwen3_next"), draft=write("qwen3_5_text"), **DRAFTED, **asks) as llm:
        answers(llm)
        calls = calls_of(llm)
        kernels = {role: planned(llm, role, "linear_attention") for role in ("target", "draft")}
    assert kernels["target"] == {"prefill": "torch", "decode": "reference", "verify": "reference"}
    assert kernels["draft"] == {"prefill": "reference", "decode": "torch", "verify": "torch"}
    for role, used in ((role, backends(calls[role], "delta")) for role in kernels):
        assert "prefill" in used and len(used) > 1 and used == only(kernels[role], used), role


@with_native
@pytest.mark.parametrize("asked", [("native", "reference"), ("reference", "native")])
@pytest.mark.parametrize(("target", "draft"), [("qwen3_next", "llama"), ("llama", "qwen3_next")])
def test_f34_each_runner_attends_by_the_kernel_of_its_own_plan_in_every_phase(
    target: str, draft: str, asked: tuple[str, str], write: Write
) -> None:
    with LLM(write(target), **ALONE, attention=asked[0]) as alone:
        digest = state(alone)[0]
    asks = {"target_attention": asked[0], "draft_attention": asked[1]}
    with LLM(write(target), draft=write(draft), **DRAFTED, **asks) as llm:
        answers(llm)
        assert state(llm)[0] == digest
        for role, kernel in zip(("target", "draft"), asked, strict=True):
            assert planned(llm, role, "attention") == dict.fromkeys(PHASES, kernel)
            used = backends(calls_of(llm)[role], "attention")
            assert len(used) > 1 and used == dict.fromkeys(used, {kernel}), role


@with_native
def test_f34_two_arrangements_of_one_cache_are_refused_in_the_runner_that_asks_for_them(write: Write) -> None:
    phases = {"prefill": "reference", "decode": "native"}
    for role in ("target", "draft"):
        with pytest.raises(KernelUnavailable, match=f"{role}: attention.decode = native(.|\n)*reads another cache"):
            LLM(write("qwen3_next"), draft=write("llama"), **DRAFTED, **{f"{role}_attention": phases})


# F31, F32


@pytest.mark.parametrize(
    "ask",
    [
        {"linear_attention": object()},
        {"linear_attention_decode": print},
        {"linear_attention_backend": "torch"},
        {"kernels": {"delta": "torch"}},
        {"plan": object()},
    ],
)
def test_f31_nobody_can_hand_an_engine_a_kernel_or_a_plan(ask: dict[str, Any], write: Write) -> None:
    with pytest.raises(ConfigError):
        LLM(write("qwen3_next"), **ALONE, **ask)


def test_f32_a_kernel_whose_self_test_failed_is_refused_by_name_and_passed_over_where_it_is_not_asked_for(
    write: Write, tmp_path: Path, verb: Verb
) -> None:
    failed = replace(LAPTOP, kernels={"torch": "failed: 3 of 8 rows differ"})
    caps = ("--caps", caps_file(tmp_path, failed))
    refused = verb("explain", write("qwen3_next"), "--linear-attention.verify", "torch", *caps)
    assert (refused.code, refused.out) == (4, "")
    for words in ("linear_attention.verify = torch", "3 of 8 rows differ", "reference"):
        assert words in refused.err
    found = decisions(verb("explain", write("qwen3_next"), "--json", *caps).json)
    decode, verify = (found[f"linear_attention.{phase}"] for phase in ("decode", "verify"))
    assert decode["value"] == verify["value"] == "reference" and verify["reason"] == "follows decode"
    assert "3 of 8 rows differ" in {one["value"]: one["reason"] for one in decode["rejected"]}["torch"]


def test_f32_an_engine_is_not_built_with_a_kernel_that_cannot_run_here(write: Write) -> None:
    with pytest.raises(KernelUnavailable, match=r"linear_attention.verify = triton(.|\n)*can run: .*torch, reference"):
        LLM(write("qwen3_next"), linear_attention_verify="triton", device="cpu", **ALONE)
    with pytest.raises(KernelUnavailable, match="draft: linear_attention.decode = flashinfer"):
        LLM(
            write("llama"), draft=write("qwen3_next"), draft_linear_attention_decode="flashinfer", device="cpu",
            **DRAFTED,
        )  # fmt: skip
