"""Which drafter serves which algorithm."""

from __future__ import annotations

from proa.errors import PlanError
from proa.plan.runner_plan import DraftContract
from proa.speculative.drafters.ngram import NgramDrafter
from proa.speculative.drafters.standalone import DraftRunner, StandaloneDrafter
from proa.speculative.protocol import Drafter
from proa.units import Algorithm

# One token of agreement says little; matches longer than 16 are as good as 16.
_MIN_MATCH = 2
_MAX_MATCH = 16


def build_drafter(
    contract: DraftContract | None, *, draft: DraftRunner | None, vocab: int, prefill_chunk: int
) -> Drafter | None:
    """The drafter that the contract names, None without one. `vocab` is the target's."""
    if contract is None or contract.algorithm is Algorithm.NONE:
        return None
    max_tokens = contract.num_draft_tokens.value
    if contract.algorithm is Algorithm.NGRAM:
        return NgramDrafter(max_tokens=max_tokens, min_match=_MIN_MATCH, max_match=_MAX_MATCH)
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
    message = f"there is no drafter for {contract.algorithm.value} with what was loaded."
    raise PlanError("speculative/no-drafter", message, role="draft")
