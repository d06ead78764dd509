"""A warm hit equals a cold run, token for token and in every log probability, on tiny checkpoints of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from proa import LLM, RequestOutput, SamplingParams
from proa.arch.delta_blocks import BLOCK
from proa.kernels.cost import CostTable
from tests.factories.foresight import write_foreseeing
from tests.factories.native import probed, why_not

WHY_NOT = why_not(probed())
PAST = range(13)
TEXT = [6 + (11 * i + i * i // 7) % 250 for i in range(300)]
OTHER = [6 + (5 * i + i * i // 3) % 250 for i in range(300)]
HYBRIDS = ("qwen3_next", "qwen3_5", "kimi_linear")


@dataclass(frozen=True)
class Case:
    """Who serves, who drafts, and with which kernels: `native` (bfloat16, exact) or `torch` (float32)."""

    family: str
    drafter: str
    kernels: str = "native"

    @property
    def step(self) -> int:
        """Tokens between two places where a prompt can go on: pages, or blocks."""
        return BLOCK if self.family in HYBRIDS else 16

    @property
    def boundaries(self) -> tuple[int, ...]:
        return (BLOCK, 2 * BLOCK) if self.family in HYBRIDS else (16, 48)


CASES = [
    Case("llama", "none"),
    Case("llama", "ngram", "torch"),
    Case("llama", "standalone"),
    Case("llama", "hybrid draft"),
    Case("glm4_moe", "nextn"),
    Case("deepseek_v3", "nextn"),
    Case("qwen3_next", "none", "torch"),
    Case("qwen3_next", "ngram"),
    Case("qwen3_next", "nextn"),
    Case("qwen3_next", "nextn", "torch"),
    Case("qwen3_5", "dense draft"),
    Case("kimi_linear", "same"),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.family}-{case.drafter}-{case.kernels}")
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.kernels == "native" and WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    return request.param


@pytest.fixture(scope="module")
def opened(case: Case, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """A model of the case, with further settings."""

    def write(family: str) -> Path:
        if family == "llama":
            return tiny(family)
        more = {"linear_value_head_dim": 32} if family.startswith("qwen") else {}
        return write_foreseeing(family, tmp_path_factory.mktemp(family), **more)

    model = write(case.family)
    drafts = {"standalone": "llama", "hybrid draft": "qwen3_5", "dense draft": "llama"}
    draft = write(drafts[case.drafter]) if case.drafter in drafts else model if case.drafter == "same" else None
    algorithm = "standalone" if draft else case.drafter

    def build(**settings: object) -> LLM:
        kernels = {"dtype": "bfloat16"}
        if case.kernels == "torch":
            kernels = {"dtype": "float32", "matmul_kernel": "reference"}
            kernels |= {"linear_attention": "torch"} if case.family in HYBRIDS else {}
        with pytest.MonkeyPatch.context() as patch:
            table = CostTable(rows=(1, 32), seconds=(1.0, 2.0))
            patch.setattr("proa.engine.assembly.start_costs", lambda *_: {"target": table, "draft": table})
            drafting = {} if algorithm == "none" else {"num_draft_tokens": 3}
            common = {"threads": 1, "max_model_len": 320, "speculative": algorithm, **drafting, **kernels}
            return LLM(str(model), draft=draft and str(draft), **{**common, **settings})

    return build


@pytest.fixture(scope="module")
def cold(opened: Callable[..., LLM]) -> Iterator[LLM]:
    with opened(prefix_cache="off") as llm:
        yield llm


@pytest.fixture(scope="module", params=[None, 64], ids=["whole", "in chunks"])
def warm(request: pytest.FixtureRequest, opened: Callable[..., LLM], case: Case) -> Iterator[LLM]:
    """Prompts are cut around the boundaries too, where models allow it at 7 tokens."""
    chunk = 7 if request.param and case.step == 16 and case.drafter != "hybrid draft" else request.param
    with opened(**({} if chunk is None else {"prefill_chunk": chunk})) as llm:
        assert llm.explain()["engine"]["prefix_cache"]["value"] == "on"
        yield llm


def params_of(temperature: float, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=8, ignore_eos=True, logprobs=2)


def same(outputs: list[RequestOutput], expected: list[RequestOutput], case: Case) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        for choice, other in zip(output.outputs, wanted.outputs, strict=True):
            assert choice.token_ids == other.token_ids
            rows, others = choice.logprobs or (), other.logprobs or ()
            found = [{token: entry.logprob for token, entry in row.items()} for row in rows]
            known = [{token: entry.logprob for token, entry in row.items()} for row in others]
            if case.kernels == "native":
                assert found == known
            for row, reference in zip(found, known, strict=True):
                assert row == pytest.approx(reference, abs=1e-4)


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.metrics.num_cached_tokens for output in outputs]


def test_prompts_that_end_at_and_past_a_boundary_are_answered_as_if_nothing_was_known(
    cold: LLM, warm: LLM, case: Case
) -> None:
    greedy, sampled = ([params_of(temperature, seed) for seed in PAST] for temperature in (0.0, 0.8))
    for boundary in case.boundaries:
        prompts = [TEXT[: boundary + past] for past in PAST]
        wanted = cold.generate(prompts, sampled)
        assert cached(wanted) == [0] * len(prompts)
        warm.generate([TEXT[: boundary + 30]], params_of(0.0))
        outputs = [warm.generate([prompt], one)[0] for prompt, one in zip(prompts, sampled, strict=True)]
        same(outputs, wanted, case)
        # The last token is always computed, so one that ends at the boundary goes on from the one before.
        assert cached(outputs)[1:] == [boundary] * (len(PAST) - 1)
        together = warm.generate(prompts, greedy)
        same(together, cold.generate(prompts, greedy), case)
        assert cached(together) == [boundary - case.step, *[boundary] * (len(PAST) - 1)]


def test_prompts_that_part_at_and_past_a_boundary_share_what_they_can(cold: LLM, warm: LLM, case: Case) -> None:
    boundary = case.boundaries[-1]
    prompts = [[*TEXT[: boundary + past], *OTHER[past : past + 20]] for past in PAST]
    params = [params_of(0.8, seed) for seed in PAST]
    wanted = cold.generate(prompts, params)
    outputs = [warm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    same(outputs, wanted, case)
    same(warm.generate(prompts, params), wanted, case)


def test_a_conversation_goes_on_from_its_last_turn(cold: LLM, warm: LLM, case: Case) -> None:
    prompt = OTHER[: 2 * case.step + 5]
    for turn in range(3):
        [wanted], [output] = (llm.generate([prompt], params_of(0.8, turn)) for llm in (cold, warm))
        same([output], [wanted], case)
        assert output.metrics.num_cached_tokens >= (2 * case.step if turn else 0)
        prompt = [*prompt, *output.outputs[0].token_ids, *TEXT[turn : turn + 5]]


def test_log_probabilities_of_a_known_prompt_are_those_of_an_unknown_one(cold: LLM, warm: LLM, case: Case) -> None:
    params = replace(params_of(0.0), prompt_logprobs=1)
    prompt = TEXT[: case.step + 9]
    warm.generate([prompt], params_of(0.0))
    [wanted], [output] = (llm.generate([prompt], params) for llm in (cold, warm))
    assert output.metrics.num_cached_tokens == 0
    assert len(output.prompt_logprobs) == len(prompt)
    for row, reference in zip(output.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
        assert {t: e.logprob for t, e in row.items()} == pytest.approx(
            {t: e.logprob for t, e in reference.items()}, abs=1e-4
        )
    same([output], [wanted], case)


def test_after_eviction_and_re_adding_the_answer_is_the_same(cold: LLM, opened: Callable[..., LLM], case: Case) -> None:
    prompt, params = TEXT[: 2 * case.step + 12], params_of(0.8, 3)
    rows = 2 * case.step + 80
    with opened() as llm:
        page = sum(llm.explain()["memory"]["page_bytes"].values())
    with opened(max_model_len=rows, kv_memory=(rows // 16 + 2) * page, max_num_seqs=2) as llm:
        wanted = cold.generate([prompt], params)
        hits = []
        for turn in range(3):
            for _ in range(2):
                outputs = llm.generate([prompt], params)
                same(outputs, wanted, case)
                hits += cached(outputs)
            # Other prompts that fill the cache.
            for start in (turn, turn + 20, turn + 40):
                llm.generate([OTHER[start : start + rows - 12]], params_of(0.0))
        assert hits == [0, 2 * case.step] * 3
        stats = llm.stats()["prefix_cache"]
        assert stats["num_cached_tokens"] == 6 * case.step
