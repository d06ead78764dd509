"""Weight layout of one runner: the output head, ranks, rows per cache page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proa.arch.decoder import Borrow
from proa.choice import AUTO, Choice
from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.plan.context import RunnerContext
from proa.plan.decision import Decision
from proa.plan.ranks import ranks
from proa.plan.rules.settle import Knob, Option, settle

DEFAULT_PAGE = 16
TIED, OWN, BORROWED = "tied", "own", "borrowed"


def head(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[str]:
    """The output head is the embedding matrix or a matrix of its own.

    A draft that borrows it has none, and only compares a stored copy with its target's.

    | config says | lm_head stored | head |
    | --- | --- | --- |
    | tied | yes | tied; the copy must equal the embedding at load |
    | tied | no | tied |
    | untied | yes | its own |
    | untied | no | its own in a hub checkpoint (so the load is refused), tied in a GGUF file |
    """
    reads = ("spec.tied_head", "checkpoint.has_head", "checkpoint.form")
    if Borrow.HEAD in ctx.spec.borrows:
        reads = ("spec.borrows",)
        value, rule, reason = BORROWED, "head.borrowed", "the target's; a stored copy is compared with it at load"
    else:
        value, rule, reason = _head(*(facts[name] for name in reads))
    option = Option(value=value, rule=rule, reason=reason, source=Source.CHECKPOINT, reads=reads)
    return settle(Knob(name="head", role=ctx.role, ask=AUTO), facts, (option,))


def _head(is_tied: bool, is_stored: bool, form: str) -> tuple[str, str, str]:
    match is_tied, is_stored:
        case True, True:
            return TIED, "head.tied_copy", "tie_word_embeddings; the stored copy is compared with the embedding at load"
        case True, False:
            return TIED, "head.tied", "tie_word_embeddings, and no lm_head is stored"
        case False, True:
            return OWN, "head.own", "lm_head is stored, and the config does not tie it"
        case _ if form == "gguf":
            return TIED, "head.gguf", "a GGUF file without output.weight ties the head"
        case _:
            return OWN, "head.missing", "the config does not tie the head, but no lm_head is stored: the load will fail"


def _one_rank(facts: FactView) -> Blocked | None:
    tensor, expert = facts["parallel.tensor"], facts["parallel.expert"]
    if tensor == expert == 1:
        return None
    return Blocked("planned only: this version of Proa runs one rank", Source.CONSTRAINT)


ONE_RANK = Condition(
    id="parallel.one_rank", reads=("parallel.tensor", "parallel.expert"), blocks=Blocks.AUTO, check=_one_rank
)


def parallel(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[str]:
    """Ranks, as `tp=1 ep=1`. More than one can be planned; plan/ranks.py refuses to run it."""
    tensor, expert = ctx.parallel.tensor_parallel, ctx.parallel.expert_parallel
    ask = expert if tensor.is_auto else tensor
    value = ranks(facts["parallel.tensor"], facts["parallel.expert"])
    one = Option(value=value, rule="parallel.one", reason="one rank", source=Source.DEFAULT, requires=(ONE_RANK,))
    worded = Choice(value=None if ask.is_auto else value, origin=ask.origin)
    return settle(Knob(name="parallel", role=ctx.role, ask=worded), facts, (one,))


def page_size(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[int]:
    ask = ctx.intent.page_size
    reason = "wastes at most 15 rows per request, and block tables stay short"
    auto = Option(value=DEFAULT_PAGE, rule="page_size.default", reason=reason, source=Source.DEFAULT)
    asked = Option(value=ask.value or DEFAULT_PAGE, rule="", reason="", source=Source.ASKED)
    return settle(Knob(name="page_size", role=ctx.role, ask=ask), facts, (auto,), asked=asked)
