"""Speculative output is plain output: drafters x sampling features x batch sizes, greedy and sampled, on every tier.

In float32 on all tiers; in bfloat16 where the numerics are exact (native), and there prompts are also cut differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proa import LLM, RequestOutput, SamplingParams
from proa.kernels.cost import CostTable
from proa.kernels.verdicts import PASSED
from tests.factories.checkpoints import write_near
from tests.factories.foresight import write_foreseeing
from tests.factories.native import probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND)
DRAFTERS = ("ngram", "same", "near", "random", "ngram auto", "near auto")
# A bundled layer of a target of that family: right often ("nextn"), or as good as never ("random nextn").
LAYERS = {"glm4_moe": ("nextn 1", "nextn auto", "random nextn"), "deepseek_v3": ("nextn 3",)}
PAIRS = [("llama", name) for name in DRAFTERS] + [(family, name) for family, names in LAYERS.items() for name in names]
with_every_drafter = pytest.mark.parametrize(("family", "drafted"), PAIRS, indirect=True, scope="module")
TOKENS = 16
# Repetitive on purpose, so that the n-gram drafter has something to find; all of different length.
PROMPTS = [[6 + (7 * i + j % (3 + i)) % 250 for j in range(9 + 5 * i)] for i in range(8)]
SETTINGS = {"threads": 1, "max_model_len": 256}
TIERS = {
    "reference": {"dtype": "float32", "page_size": 4, "matmul_kernel": "reference"},
    "onednn": {"dtype": "float32", "page_size": 4, "matmul_kernel": "onednn"},
    "native": {"dtype": "float32"},
    "native in bfloat16": {"dtype": "bfloat16"},
}

CASES = {
    "bare": SamplingParams(),
    "repetition penalty": SamplingParams(repetition_penalty=1.4),
    "presence and frequency penalties": SamplingParams(presence_penalty=1.5, frequency_penalty=0.7),
    "logit bias": SamplingParams(logit_bias={40: 4.0, 41: -100.0, 300: 6.0}),
    "min_p": SamplingParams(min_p=0.1),
    "top_k and top_p": SamplingParams(top_k=20, top_p=0.8),
    "min_tokens": SamplingParams(min_tokens=12, logit_bias={1: 8.0}),
    "stop token": SamplingParams(stop_token_ids=[300, 301], logit_bias={300: 5.0, 301: 5.0}),
    "end of text": SamplingParams(logit_bias={1: 5.0}),
    "end of text ignored": SamplingParams(logit_bias={1: 5.0}, ignore_eos=True),
    "allowed tokens": SamplingParams(allowed_token_ids=list(range(6, 90))),
    "five tokens, hence loops": SamplingParams(allowed_token_ids=[20, 21, 22, 23, 24]),
    "bad words": SamplingParams(bad_words=["a", " 1", "the"]),
}


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "llama")


@pytest.fixture(scope="module")
def target(family: str, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_foreseeing(family, tmp_path_factory.mktemp(family)) if family in LAYERS else tiny(family)


@pytest.fixture(scope="module", params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    backend = request.param.partition(" ")[0]
    if backend == "native" and WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    if backend == "onednn" and FOUND.caps.verdict("onednn") != PASSED:
        pytest.skip(f"onednn: {FOUND.caps.verdict('onednn')}")
    return request.param


@pytest.fixture(scope="module")
def plain(target: Path, tier: str) -> Iterator[LLM]:
    with LLM(str(target), speculative="none", **SETTINGS, **TIERS[tier]) as llm:
        kernels = {knob: entry["value"] for knob, entry in llm.explain()["runners"]["target"]["decisions"].items()}
        assert kernels["matmul_kernel"] == tier.partition(" ")[0]
        assert kernels["numerics"] == ("exact" if tier.startswith("native") else "fast")
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> Callable[[str, float], list[RequestOutput]]:
    """Plain answers of a case, worked out once for all drafters."""
    known: dict[tuple[str, float], list[RequestOutput]] = {}

    def answers(case: str, temperature: float) -> list[RequestOutput]:
        if (case, temperature) not in known:
            known[case, temperature] = plain.generate(PROMPTS, params_of(case, temperature))
        return known[case, temperature]

    return answers


def params_of(case: str, temperature: float) -> list[SamplingParams]:
    """A seed for each of the eight prompts."""
    shared = replace(CASES[case], temperature=temperature, max_tokens=TOKENS, logprobs=3)
    return [replace(shared, seed=100 + number) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def drafted(
    request: pytest.FixtureRequest, family: str, target: Path, tier: str, tiny: Callable[..., Path], tmp_path_factory
) -> Iterator[LLM]:
    drafts = {
        "same": lambda: target,
        "near": lambda: write_near("llama", tmp_path_factory.mktemp("near"), noise=0.08),
        "random": lambda: tiny("qwen3", seed=9),
    }
    kind, length = drafter_of(request.param)
    draft = drafts[kind]() if kind in drafts else None
    model = target
    if kind == "random nextn":
        model = write_foreseeing(family, tmp_path_factory.mktemp(family), is_right=False)
    algorithm = kind.removeprefix("random ") if "nextn" in kind or kind == "ngram" else "standalone"
    with pytest.MonkeyPatch.context() as patch:
        # A given cost table, so that lengths are the same wherever this runs: more rows cost little, as they should.
        costs = {"target": CostTable(rows=(1, 32), seconds=(1.0, 2.0))}
        if algorithm != "ngram":
            costs["draft"] = CostTable(rows=(1, 32), seconds=(0.05, 0.1))
        patch.setattr("proa.engine.assembly.start_costs", lambda *_: costs)
        cut = {"prefill_chunk": 7} if tier.startswith("native") else {}
        settings = {"speculative": algorithm, "num_draft_tokens": length, **SETTINGS, **TIERS[tier], **cut}
        llm = LLM(str(model), draft=draft and str(draft), **settings)
    with llm:
        yield llm


def drafter_of(name: str) -> tuple[str, int | str]:
    """What proposes, and how many tokens."""
    kind, _, length = name.rpartition(" ")
    if length == "auto":
        return kind, length
    return (kind, int(length)) if length.isdigit() else (name, 4)


@with_every_drafter
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("case", CASES)
def test_speculative_output_is_plain_output(
    expected: Callable[[str, float], list[RequestOutput]], drafted: LLM, case: str, temperature: float
) -> None:
    params, wanted = params_of(case, temperature), expected(case, temperature)
    assert_same(drafted.generate(PROMPTS, params), wanted)
    assert_same(drafted.generate([PROMPTS[5]], params[5]), wanted[5:6])


@with_every_drafter
def test_the_drafters_of_this_matrix_are_right_as_often_as_they_should_be(drafted: LLM, request) -> None:
    """Else the matrix would prove little: acceptance and rejection must both occur in it."""
    before = drafted.stats()["speculative_decoding"]
    drafted.generate(PROMPTS, params_of("five tokens, hence loops", 0.0))
    drafted.generate(PROMPTS, params_of("bare", 0.8))
    after = drafted.stats()["speculative_decoding"]
    accepted, proposed = (after[name] - before[name] for name in ("num_accepted_tokens", "num_draft_tokens"))
    kind, _ = drafter_of(request.node.callspec.params["drafted"])
    least, most = {"ngram": (0.1, 1), "same": (1, 1), "near": (0.3, 0.95), "nextn": (0.3, 0.95)}.get(kind, (0, 0.2))
    assert proposed > 50
    assert least <= accepted / proposed <= most


@with_every_drafter
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stop_strings_end_speculative_output_at_the_same_character(
    plain: LLM, drafted: LLM, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=TOKENS, logprobs=0)
    texts = [output.outputs[0].text for output in plain.generate(PROMPTS, params)]
    for include in (False, True):
        stopping = [replace(params, stop=[text[9:11]], include_stop_str_in_output=include) for text in texts]
        expected = plain.generate(PROMPTS, stopping)
        assert all(output.outputs[0].finish_reason == "stop" for output in expected)
        assert_same(drafted.generate(PROMPTS, stopping), expected)


@with_every_drafter
def test_choices_of_one_prompt_are_the_same_with_speculation(plain: LLM, drafted: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=12, logprobs=0)
    expected = plain.generate(PROMPTS[:2], params)
    assert len({choice.token_ids for choice in expected[0].outputs}) == 3
    assert_same(drafted.generate(PROMPTS[:2], params), expected)


@with_every_drafter
def test_a_request_that_asks_for_no_speculation_gets_none_and_the_same_answer(plain: LLM, drafted: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, speculative=False)
    output = drafted.generate(PROMPTS, params)
    assert all(one.metrics.speculative_decoding is None for one in output)
    assert_same(output, plain.generate(PROMPTS, params))


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.metrics.num_output_tokens == wanted.metrics.num_output_tokens
        for choice, other in zip(output.outputs, wanted.outputs, strict=True):
            assert choice.token_ids == other.token_ids
            assert (choice.text, choice.finish_reason, choice.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )
            assert len(choice.logprobs or ()) == len(choice.token_ids)
            for row, reference in zip(choice.logprobs or (), other.logprobs or (), strict=True):
                assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
                    {token: entry.logprob for token, entry in reference.items()}, abs=1e-4
                )


@pytest.mark.parametrize(
    ("family", "drafter", "memory"),
    [
        ("llama", "ngram", 110),
        ("llama", "same", 250),
        ("llama", "near", 250),
        ("glm4_moe", "nextn", 380),
        ("deepseek_v3", "nextn", 110),
    ],
    indirect=["family"],
)
def test_preemption_changes_no_answer_whoever_proposes(
    plain: LLM, target: Path, tier: str, tmp_path: Path, drafter: str, memory: int
) -> None:
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True, logprobs=0) for i in range(8)]
    wanted = plain.generate(PROMPTS, params)
    draft = {"same": lambda: target, "near": lambda: write_near("llama", tmp_path, noise=0.08)}.get(drafter)
    settings = {**SETTINGS, **TIERS[tier], "max_model_len": 100, "num_draft_tokens": 3}
    # KiB of float32 rows, in whichever type the tier keeps them.
    settings["kv_memory"] = f"{memory // (2 if settings['dtype'] == 'bfloat16' else 1)}KiB"
    algorithm = "standalone" if draft else drafter
    with LLM(target, draft=draft and draft(), speculative=algorithm, max_num_seqs=8, **settings) as llm:
        # The answers do not fit together, so somebody has to step back.
        rows = llm.explain()["engine"]["memory.target_pages"]["value"] * settings.get("page_size", 16)
        assert rows < sum(map(len, PROMPTS)) + 8 * 40
        assert_same(llm.generate(PROMPTS, params), wanted)
