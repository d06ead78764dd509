"""Which drafter, which policy of lengths and which watch serve a contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from proa.errors import PlanError
from proa.kernels.cost import CostTable
from proa.plan.runner_plan import DraftContract
from proa.speculative.draft_length import DraftLengths, FixedLengths, MeasuredLengths, StepCosts
from proa.speculative.drafters.nextn import NextNDrafter
from proa.speculative.drafters.ngram import NgramDrafter
from proa.speculative.drafters.standalone import StandaloneDrafter
from proa.speculative.drift import AcceptWatch
from proa.speculative.protocol import Drafter, DraftRunner
from proa.units import Algorithm

# One token of agreement says little: proposals of a fixed length need two. Where the length follows from acceptance, a
# single one is tried as well and soon left out where it does not pay. Matches longer than 16 are as good as 16.
_MIN_MATCH = 2
_MAX_MATCH = 16

# Before anything was judged. N-grams: by length of the match, measured with benchmarks/draft_policy.py on prompts other
# than those it reports; the estimate soon forgets them. NextN: of DeepSeek-V3's published accept lengths, 1.85, 2.5 and
# 2.9 for 1, 2 and 3 tokens.
PRIORS: Mapping[Algorithm, tuple[float, ...]] = MappingProxyType(
    {
        Algorithm.NGRAM: (0.25, 0.45, 0.65, 0.65, *[0.8] * 4, *[0.85] * 7, 0.95),
        Algorithm.STANDALONE: (0.7,) * 16,
        Algorithm.NEXTN: (0.85, 0.76, 0.62, *[0.5] * 13),
    }
)


def build_drafter(
    contract: DraftContract | None, *, draft: DraftRunner | None, vocab: int, prefill_chunk: int
) -> Drafter | None:
    """The drafter that the contract names, None without one. `vocab` is the target's."""
    if contract is None or contract.algorithm is Algorithm.NONE:
        return None
    max_tokens = contract.num_draft_tokens.value
    if contract.algorithm is Algorithm.NGRAM:
        min_match = 1 if contract.measures_length else _MIN_MATCH
        return NgramDrafter(max_tokens=max_tokens, min_match=min_match, max_match=_MAX_MATCH)
    if contract.algorithm is Algorithm.STANDALONE and draft is not None:
        return StandaloneDrafter(
            runner=draft,
            max_tokens=max_tokens,
            draft_vocab=vocab if contract.draft_vocab is None else contract.draft_vocab,
            vocab=vocab,
            prefill_chunk=prefill_chunk,
            verification=contract.verification.value,
            max_positions=contract.max_positions,
        )
    if contract.algorithm is Algorithm.NEXTN and draft is not None:
        return NextNDrafter(
            runner=draft,
            max_tokens=max_tokens,
            vocab=vocab,
            prefill_chunk=prefill_chunk,
            verification=contract.verification.value,
            max_positions=contract.max_positions,
        )
    message = f"there is no drafter for {contract.algorithm.value} with what was loaded."
    raise PlanError("speculative/no-drafter", message, role="draft")


def target_gives_hidden(contract: DraftContract | None) -> bool:
    """Whether the drafter reads the target's hidden rows."""
    return contract is not None and bool(contract.taps)


def draft_gives_hidden(contract: DraftContract | None) -> bool:
    """Whether the draft goes on from its own hidden rows."""
    return contract is not None and contract.algorithm is Algorithm.NEXTN and contract.num_draft_tokens.value > 1


def build_watch(contract: DraftContract | None, note: Callable[[str], None]) -> AcceptWatch | None:
    """None where nothing proposes, and for n-grams: text that never recurs is no fault of theirs."""
    if contract is None or contract.algorithm in {Algorithm.NONE, Algorithm.NGRAM}:
        return None
    return AcceptWatch(note)


def build_lengths(
    contract: DraftContract | None, costs: Mapping[str, CostTable], note: Callable[[str], None]
) -> DraftLengths:
    """The policy that the contract asks for. `costs` by role; needed where lengths are measured."""
    if contract is None or not contract.measures_length:
        return FixedLengths(0 if contract is None else contract.num_draft_tokens.value)
    return MeasuredLengths(
        longest=contract.num_draft_tokens.value,
        costs=StepCosts(target=costs["target"], draft=costs.get("draft")),
        prior=PRIORS[contract.algorithm],
        note=note,
    )
