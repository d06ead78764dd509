"""Bundled next-token layers: each logit and each drafted token equals that of an independent forward beside
transformers' model, from the target's own hidden rows, one step and chained, whatever target and draft are stored in.

The checkpoints and their reference.npz are written by another program; PROA_ORACLES names their directory, which has a
folder for each form in which they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from proa.cache.transaction import CacheTransaction
from proa.engine.assembly import build_runners, join
from proa.loading.progress import Silent
from proa.plan.planned import Resolved
from proa.runner.runner import Runner
from proa.sampling.params import SamplingParams
from proa.speculative.protocol import DraftContext, DraftRequest, HiddenRows
from proa.speculative.registry import build_drafter
from proa.units import Phase
from tests.engine.table_model import request as asked_of
from tests.engine.table_model import run, tokens_of
from tests.factories.headers import LAPTOP, planned
from tests.factories.native import probed, why_not
from tests.factories.oracles import chunk_of
from tests.factories.runners import Rows
from tests.speculative.worlds import state

pytestmark = pytest.mark.oracle

FAMILIES = (
    "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa",
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text",
)  # fmt: skip
FORMS = ("plain", "fp8", "fp8_plain_draft")
BACKENDS = ("reference", "native")
FOUND = probed()
WHY_NOT = why_not(FOUND)
TOLERANCE = 2e-4
K = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """`tokens` are the prompt and the first token after it. `first` [prompt rows, V] are the layer's logits after each
    of them, `chained` [K, V] those that the drafted `tokens_after` are the best of."""

    tokens: list[int]
    hidden: torch.Tensor
    first: torch.Tensor
    chained: torch.Tensor
    tokens_after: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    resolved: Resolved
    target: Runner
    draft: Runner


@pytest.fixture(scope="module", params=[f"{form}/{family}" for form in FORMS for family in FAMILIES])
def path(request: pytest.FixtureRequest, oracle_dir: Path) -> Path:
    folder = oracle_dir / request.param
    if not folder.is_dir():
        pytest.skip(f"PROA_ORACLES has no {request.param}")
    return folder


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    with np.load(path / "reference.npz") as arrays:
        return Reference(
            tokens=[*arrays["prompt"].tolist(), int(arrays["greedy"][0])],
            hidden=torch.from_numpy(arrays["hidden"]),
            first=torch.from_numpy(arrays["draft_logits"]),
            chained=torch.from_numpy(arrays["draft_step_logits"]),
            tokens_after=arrays["draft_tokens"].tolist(),
        )


@pytest.fixture(scope="module")
def pairs(path: Path) -> Callable[[str], Pair]:
    """`pairs("native")`: target and draft of the checkpoint on that backend, built once each."""
    built: dict[str, Pair] = {}

    def pair(backend: str) -> Pair:
        if backend == "native" and WHY_NOT is not None:
            pytest.skip(WHY_NOT)
        if backend not in built:
            caps = LAPTOP if backend == "reference" else replace(FOUND.caps, device="cpu")
            asks = {"dtype": "float32", "matmul_kernel": backend, "max_model_len": 256, "prefill_chunk": 7}
            resolved = planned(path, caps=caps, speculative="nextn", num_draft_tokens=K, prefix_cache="off", **asks)
            built[backend] = pair_of(resolved)
            runners = (built[backend].target, built[backend].draft)
            assert {runner.describe()["matmul_kernel"] for runner in runners} == {backend}
        return built[backend]

    return pair


def pair_of(resolved: Resolved) -> Pair:
    target, draft = build_runners(resolved, Silent(), FOUND.library)
    assert draft is not None
    return Pair(resolved=resolved, target=target, draft=draft)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max().item() < TOLERANCE


def hidden_of(pair: Pair, prompt: list[int], chunk: int) -> torch.Tensor:
    """The target's hidden rows of a prompt, processed in chunks."""
    rows = Rows(pair.target, 1, 128)
    spans = [rows.span(0, Phase.PREFILL, prompt[at : at + chunk], ()) for at in range(0, len(prompt), chunk)]
    parts = [pair.target.forward([span]).hidden for span in spans]
    return torch.cat([part for part in parts if part is not None])


def draft_rows(
    rows: Rows, hidden: torch.Tensor, tokens: list[int], phase: Phase = Phase.PREFILL
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and output rows of the layer for the next rows of request 0."""
    output = rows.runner.forward([replace(rows.span(0, phase, tokens), hidden=hidden)])
    assert output.hidden is not None
    return output.logits, output.hidden


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_layer_gives_the_reference_s_logits_after_every_token_and_along_the_chain(
    reference: Reference, pairs: Callable[[str], Pair], backend: str, chunk: int
) -> None:
    pair = pairs(backend)
    hidden = hidden_of(pair, reference.tokens[:-1], chunk_of(pair.target, chunk))
    assert_close(hidden, reference.hidden)
    rows, after = Rows(pair.draft, 1, 128), reference.tokens[1:]
    starts = range(0, len(after), chunk)
    parts = [draft_rows(rows, hidden[at : at + chunk], after[at : at + chunk]) for at in starts]
    assert_close(torch.cat([logits for logits, _ in parts]), reference.first)
    logits, own = parts[-1][0][-1:], parts[-1][1][-1:]
    for step, token in enumerate(reference.tokens_after):
        assert_close(logits[0], reference.chained[step])
        assert int(logits.argmax()) == token
        logits, own = draft_rows(rows, own, [token], Phase.DECODE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_drafter_proposes_the_reference_s_tokens_and_keeps_the_target_s_rows_only(
    reference: Reference, pairs: Callable[[str], Pair], backend: str
) -> None:
    pair = pairs(backend)
    vocab, tokens = pair.resolved.target.spec.vocab, reference.tokens
    drafter = build_drafter(pair.resolved.plans.contract, draft=pair.draft, vocab=vocab, prefill_chunk=7)
    assert drafter is not None and drafter.needs_hidden
    drafter.observe([HiddenRows(request_id=0, start=0, rows=hidden_of(pair, tokens[:-1], 1000))])
    sampling = state(SamplingParams(temperature=0), prompt=tokens[:-1])
    asked = DraftRequest(request_id=0, tokens=tokens, sampling=sampling, limit=K)
    with CacheTransaction([pair.draft.tables]) as transaction:
        proposal = drafter.propose(DraftContext(requests=(asked,)))
        transaction.commit({0: K})
    assert list(proposal.tokens[0]) == reference.tokens_after
    assert pair.draft.tables.length(0) == len(tokens) - 1
    drafter.release([0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_that_drafts_with_the_layer_answers_as_one_that_does_not(
    reference: Reference, pairs: Callable[[str], Pair], backend: str, length: int, temperature: float
) -> None:
    pair = pairs(backend)
    contract = pair.resolved.plans.contract
    assert contract is not None
    shorter = replace(contract, num_draft_tokens=replace(contract.num_draft_tokens, value=length))
    resolved = replace(pair.resolved, plans=replace(pair.resolved.plans, contract=shorter))
    engine = join(resolved, pair.target, pair.draft, {}, lambda line: None)
    prompts = [reference.tokens[:count] for count in (5, 76, 1, 33)]

    def answers(speculative: bool) -> dict[int, list[int]]:
        asked = [
            asked_of(number, prompt, max_tokens=24, temperature=temperature, speculative=speculative)
            for number, prompt in enumerate(prompts)
        ]
        return tokens_of(run(engine, asked))

    plain = answers(False)
    assert engine.stats.num_drafts == 0
    assert answers(True) == plain
    assert engine.stats.num_drafts > 50
    assert pair.draft.tables.pool.num_free == pair.draft.tables.pool.num_pages


def test_hidden_rows_that_are_one_position_off_are_noticed(reference: Reference, pairs: Callable[[str], Pair]) -> None:
    """The reverse."""
    pair = pairs("reference")
    logits, _ = draft_rows(Rows(pair.draft, 1, 128), reference.hidden[1:], reference.tokens[1:-1])
    assert (logits - reference.first[:-1]).abs().max().item() > 100 * TOLERANCE


def test_a_layer_of_which_one_weight_is_wrong_is_noticed(reference: Reference, path: Path) -> None:
    """The reverse: the norm of the hidden rows off by 1 % moves the logits past the tolerance."""
    settings = {"speculative": "nextn", "num_draft_tokens": K, "dtype": "float32", "matmul_kernel": "reference"}
    pair = pair_of(planned(path, **settings))
    pair.draft._model.entry.hidden_norm.scale.mul_(1.01)
    hidden = hidden_of(pair, reference.tokens[:-1], 1000)
    logits, _ = draft_rows(Rows(pair.draft, 1, 128), hidden, reference.tokens[1:])
    assert (logits - reference.first).abs().max().item() > TOLERANCE
