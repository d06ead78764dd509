"""Speculative output is plain output for models with states: whoever drafts, whichever way a rejection is undone.

Every plain answer comes from a run without prefix reuse; the others reuse what they can.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from proa import LLM, RequestOutput, SamplingParams
from proa.kernels.cost import CostTable
from tests.factories.foresight import write_foreseeing
from tests.factories.native import probed, why_not

WHY_NOT = why_not(probed())
SETTINGS = {"threads": 1, "max_model_len": 384}
TIERS = {
    "torch": {"dtype": "float32", "page_size": 4, "matmul_kernel": "reference", "target.linear_attention": "torch"},
    "native": {"dtype": "bfloat16"},
}
# A next-token layer that is right often, or as good as never; the target as its own draft; a dense draft of a hybrid
# target, and the reverse.
PAIRS = [
    ("qwen3_next", "ngram replay"),
    ("qwen3_next", "ngram states"),
    ("qwen3_next", "nextn replay"),
    ("qwen3_next", "nextn states"),
    ("qwen3_next", "random nextn"),
    ("qwen3_next", "same states"),
    ("qwen3_next", "dense draft"),
    ("qwen3_5", "nextn auto"),
    ("qwen3_5_moe", "nextn replay"),
    ("kimi_linear", "ngram states"),
    ("kimi_linear", "same replay"),
    ("llama", "hybrid draft"),
]
SLOW = [pair for pair in PAIRS if pair[1] in {"ngram states", "nextn replay", "same replay", "hybrid draft"}]
CASES = [("native", *pair) for pair in PAIRS] + [("torch", *pair) for pair in SLOW]
with_every_pair = pytest.mark.parametrize(("tier", "family", "drafted"), CASES, indirect=True, scope="module")
TOKENS = 24
# Ends before, at and after a block's end; repetitive, so that n-grams find something.
LENGTHS = (5, 63, 64, 65, 90, 128, 140, 9)
PROMPTS = [[6 + (7 * i + j % (3 + i)) % 250 for j in range(length)] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def write(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def write(family: str, *, is_right: bool = True) -> Path:
        if family == "llama":
            return tiny(family)
        value_dim = {} if family == "kimi_linear" else {"linear_value_head_dim": 32}
        return write_foreseeing(family, tmp_path_factory.mktemp(family), is_right=is_right, **value_dim)

    return write


@pytest.fixture(scope="module")
def tier(request: pytest.FixtureRequest, family: str) -> dict[str, object]:
    if request.param == "native" and WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    settings = {key.replace("target.", "target_"): value for key, value in TIERS[request.param].items()}
    if family == "llama":
        settings.pop("target_linear_attention", None)
    return settings


@pytest.fixture(scope="module")
def plain(write: Callable[..., Path], family: str, tier: dict[str, object]) -> Iterator[LLM]:
    with LLM(str(write(family)), speculative="none", prefix_cache="off", **SETTINGS, **tier) as llm:
        numerics = llm.explain()["runners"]["target"]["decisions"]["numerics"]["value"]
        assert numerics == ("exact" if tier["dtype"] == "bfloat16" else "fast")
        yield llm


@pytest.fixture(scope="module")
def drafted(
    request: pytest.FixtureRequest, write: Callable[..., Path], family: str, tier: dict[str, object]
) -> Iterator[LLM]:
    with opened(request.param, write, family, tier) as llm:
        yield llm


def opened(drafter: str, write: Callable[..., Path], family: str, tier: dict[str, object], **more: object) -> LLM:
    kind, _, way = drafter.partition(" ")
    model, draft = write(family, is_right=kind != "random"), None
    algorithm = "nextn" if "nextn" in drafter else "ngram" if kind == "ngram" else "standalone"
    if algorithm == "standalone":
        draft = {"same": lambda: model, "dense": lambda: write("llama"), "hybrid": lambda: write("qwen3_5")}[kind]()
    settings: dict[str, object] = {"num_draft_tokens": "auto" if way == "auto" else 3, "prefill_chunk": 64}
    if way in ("replay", "states"):
        settings["target_rollback"] = way
    with pytest.MonkeyPatch.context() as patch:
        # A given cost table, so that lengths are the same wherever this runs.
        costs = {"target": CostTable(rows=(1, 32), seconds=(1.0, 2.0))}
        costs |= {} if algorithm == "ngram" else {"draft": CostTable(rows=(1, 32), seconds=(0.05, 0.1))}
        patch.setattr("proa.engine.assembly.start_costs", lambda *_: costs)
        settings |= {**SETTINGS, **tier, **more}
        return LLM(str(model), draft=draft and str(draft), speculative=algorithm, **settings)


def params_of(temperature: float, **more: object) -> list[SamplingParams]:
    shared = SamplingParams(temperature=temperature, max_tokens=TOKENS, logprobs=1, ignore_eos=True, **more)
    return [replace(shared, seed=100 + number) for number in range(len(PROMPTS))]


@with_every_pair
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculative_output_is_plain_output(plain: LLM, drafted: LLM, temperature: float) -> None:
    params = params_of(temperature)
    wanted = plain.generate(PROMPTS, params)
    assert_same(drafted.generate(PROMPTS, params), wanted)
    for index in (0, 3, 6):
        assert_same(drafted.generate([PROMPTS[index]], params[index]), wanted[index : index + 1])


@with_every_pair
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_requests_with_and_without_proposals_share_their_steps(plain: LLM, drafted: LLM, temperature: float) -> None:
    params = [replace(one, speculative=bool(index % 2)) for index, one in enumerate(params_of(temperature))]
    params[4] = replace(params[4], presence_penalty=1.5, top_k=20)
    assert_same(drafted.generate(PROMPTS, params), plain.generate(PROMPTS, params))


@with_every_pair
def test_the_drafters_of_this_matrix_are_right_as_often_as_they_should_be(drafted: LLM, request) -> None:
    """Else the matrix would prove little: acceptance and rejection must both occur in it."""
    before = drafted.stats()["speculative_decoding"]
    drafted.generate(PROMPTS, params_of(0.0, allowed_token_ids=[20, 21, 22, 23, 24]))
    drafted.generate(PROMPTS, params_of(0.8))
    after = drafted.stats()["speculative_decoding"]
    accepted, proposed = (after[name] - before[name] for name in ("num_accepted_tokens", "num_draft_tokens"))
    kind = request.node.callspec.params["drafted"].partition(" ")[0]
    least, most = {"ngram": (0.05, 0.95), "same": (1, 1), "nextn": (0.3, 0.95)}.get(kind, (0, 0.5))
    assert proposed > 50
    assert least <= accepted / proposed <= most


@with_every_pair
def test_stop_strings_and_choices_are_the_same(plain: LLM, drafted: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=TOKENS, logprobs=0)
    wanted = plain.generate(PROMPTS[:4], params)
    assert_same(drafted.generate(PROMPTS[:4], params), wanted)
    stopping = [replace(params, n=1, stop=[one.outputs[0].text[5:7] or "x"]) for one in wanted]
    assert_same(drafted.generate(PROMPTS[:4], stopping), plain.generate(PROMPTS[:4], stopping))


STEPPING_BACK = ("ngram states", "nextn replay", "same replay", "hybrid draft", "ngram replay", "same states")


@pytest.mark.parametrize(
    ("tier", "family", "drafter", "prefix_cache"),
    [("native", *pair, switch) for pair in PAIRS if pair[1] in STEPPING_BACK for switch in ("on", "off")]
    + [("torch", "qwen3_next", "nextn replay", "on"), ("torch", "qwen3_next", "ngram states", "off")],
    indirect=["tier", "family"],
)
def test_preemption_changes_no_answer(
    plain: LLM, write: Callable[..., Path], family: str, tier: dict[str, object], drafter: str, prefix_cache: str
) -> None:
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=100, ignore_eos=True, logprobs=0) for i in range(6)]
    prompts = PROMPTS[1:7]
    wanted = plain.generate(prompts, params)
    more = {"max_model_len": 240, "prefix_cache": prefix_cache, "max_num_seqs": 6}
    with opened(drafter, write, family, tier, **more, kv_memory=memory_of(plain, family)) as llm:
        preempted = watch_preemptions(llm._open_parts.engine)
        assert_same(llm.generate(prompts, params), wanted)
        assert preempted


def memory_of(plain: LLM, family: str) -> int:
    """Bytes for two or three answers at their full length. A draft has about as many layers with rows as its target,
    or one."""
    told = plain.explain()
    page = told["memory"]["page_bytes"]["target"] * (2 if family != "llama" else 1.4)
    return int(2.2 * 256 / told["runners"]["target"]["decisions"]["page_size"]["value"] * page)


# 99.99 % of chi-square with 26 degrees of freedom, from a table.
MOST = 61.6
THREE = (20, 21, 22)


def test_rejection_with_a_next_token_layer_has_the_distribution_of_plain_sampling(write: Callable[..., Path]) -> None:
    model, prompt, asks = write("qwen3_5"), PROMPTS[4], {"speculative": "nextn", "num_draft_tokens": 2, **SETTINGS}
    params = [
        SamplingParams(temperature=2.0, seed=seed, n=8, max_tokens=3, allowed_token_ids=THREE, ignore_eos=True)
        for seed in range(100)
    ]
    with LLM(str(model), verification="rejection", dtype="float32", **asks) as llm:
        wanted = distribution(llm, prompt, temperature=2.0)
        before = llm.stats()["speculative_decoding"]["num_draft_tokens"]
        outputs = llm.generate([prompt] * len(params), params)
        stats, pages = llm.stats()["speculative_decoding"], pools(llm)
    said = Counter(choice.token_ids for output in outputs for choice in output.outputs)
    assert 0.1 < stats["acceptance_rate"] < 0.95
    assert stats["num_draft_tokens"] - before > 500
    total = sum(said.values())
    assert sum((said[tokens] - total * p) ** 2 / (total * p) for tokens, p in wanted.items()) < MOST
    with LLM(str(model), verification="coupled", dtype="float32", **asks) as llm:
        assert pools(llm) == pages


def distribution(llm: LLM, prompt: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """Of three tokens of three ids, from the model's log probabilities of prompts that end with them."""
    endings = list(product(THREE, repeat=3))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    known: dict[tuple[int, ...], float] = {}
    for ending, output in zip(endings, llm.generate([[*prompt, *one] for one in endings], params), strict=True):
        for count in (1, 2, 3):
            row = output.prompt_logprobs[len(prompt) + count - 1]
            known[ending[:count]] = math.exp(row[ending[count - 1]].logprob / temperature)
    return {
        ending: math.prod(
            known[ending[:count]] / sum(known[*ending[: count - 1], token] for token in THREE) for count in (1, 2, 3)
        )
        for ending in endings
    }


def pools(llm: LLM) -> dict[str, int]:
    return {knob: entry["value"] for knob, entry in llm.explain()["engine"].items() if knob.startswith("memory.")}


def watch_preemptions(engine) -> list[int]:
    """Collects the ids of preempted requests, as they come."""
    seen: list[int] = []
    schedule = engine._scheduler.schedule

    def watched():
        plan = schedule()
        seen.extend(plan.preempted)
        return plan

    engine._scheduler.schedule = watched
    return seen


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        for choice, other in zip(output.outputs, wanted.outputs, strict=True):
            assert choice.token_ids == other.token_ids
            assert (choice.text, choice.finish_reason) == (other.text, other.finish_reason)
            for row, reference in zip(choice.logprobs or (), other.logprobs or (), strict=True):
                assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
                    {token: entry.logprob for token, entry in reference.items()}, abs=1e-4
                )
