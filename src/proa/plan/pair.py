"""May this draft propose for this target? Conditions over facts of both checkpoints, and the contract they yield.

Plans of neither runner are looked at: a pair fits or does not fit by what the models and their tokenizers are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proa.arch.decoder import DecoderSpec, DraftSpec
from proa.checkpoint.types import Checkpoint
from proa.checkpoint.vocab import token_texts
from proa.conditions import Blocked, Blocks, Condition, FactView, Source, evaluate
from proa.errors import PlanError
from proa.plan.context import TargetFacts
from proa.plan.decision import Decision, Note
from proa.plan.runner_plan import DraftContract, PairCheck, PairVerdict
from proa.plan.tokens import TokenTable
from proa.units import Algorithm, Verification


def _have_tokenizers(facts: FactView) -> Blocked | None:
    for role in ("target", "draft"):
        if facts[f"{role}.tokens"] is None:
            return Blocked(f"the {role} checkpoint has no tokenizer, so ids cannot be compared", Source.CHECKPOINT)
    return None


def _ids_agree(facts: FactView) -> Blocked | None:
    target, draft = facts["target.tokens"], facts["draft.tokens"]
    if target is None or draft is None:
        return None
    index = target.first_difference(draft)
    if index is None:
        return None
    return Blocked(
        f"token id {index} is {target.show(index)} in the target and {draft.show(index)} in the draft",
        Source.CHECKPOINT,
    )


def _rows_cover_ids(facts: FactView) -> Blocked | None:
    tokens, rows = facts["draft.tokens"], facts["draft.vocab"]
    if tokens is None or tokens.count <= rows:
        return None
    return Blocked(f"the draft has {rows} embedding rows for {tokens.count} token ids", Source.CHECKPOINT)


def _same_padding(facts: FactView) -> Blocked | None:
    target, draft = facts["target.vocab"], facts["draft.vocab"]
    if target == draft:
        return None
    return Blocked(
        f"padding differs: {target} embedding rows in the target, {draft} in the draft; ids agree, so this is fine",
        Source.CHECKPOINT,
    )


def _reaches_as_far(facts: FactView) -> Blocked | None:
    target, draft = facts["schedule.max_model_len"], facts["draft.max_positions"]
    if draft >= target:
        return None
    return Blocked(
        f"the draft was trained for {draft} positions, requests may have {target}: nothing is proposed beyond {draft}",
        Source.CHECKPOINT,
    )


def _condition(name: str, reads: tuple[str, ...], blocks: Blocks, check: Any) -> Condition:
    return Condition(id=f"pair.{name}", reads=reads, blocks=blocks, check=check)


STANDALONE = (
    _condition("tokenizers", ("target.tokens", "draft.tokens"), Blocks.ALWAYS, _have_tokenizers),
    _condition("ids_agree", ("target.tokens", "draft.tokens"), Blocks.ALWAYS, _ids_agree),
    _condition("rows_cover_ids", ("draft.tokens", "draft.vocab"), Blocks.ALWAYS, _rows_cover_ids),
    _condition("padding", ("target.vocab", "draft.vocab"), Blocks.AUTO, _same_padding),
    _condition("context", ("schedule.max_model_len", "draft.max_positions"), Blocks.AUTO, _reaches_as_far),
)
"""ALWAYS conditions refuse the pair; AUTO ones are remarks about a pair that works."""


def _same(what: str, fact: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        target, draft = facts[f"target.{fact}"], facts[f"draft.{fact}"]
        if target == draft:
            return None
        return Blocked(f"{what}: {target} in the target, {draft} in the draft", Source.CHECKPOINT)

    return _condition(fact, (f"target.{fact}", f"draft.{fact}"), Blocks.ALWAYS, check)


def _follows_last_layer(facts: FactView) -> Blocked | None:
    target, layers, own = facts["target.num_layers"], facts["draft.layers"], facts["draft.num_layers"]
    if layers == [0]:  # numbered by itself, under names of its own: the model beside it must be like the target
        why = f"the target has {target} layers, the draft was made for a model of {own}"
        return None if own == target else Blocked(why, Source.CHECKPOINT)
    if layers == [target]:
        return None
    said = ", ".join(map(str, layers))
    return Blocked(
        f"the target ends before layer {target}, where the draft's one layer must be; it has {said}", Source.CHECKPOINT
    )


def _taps_fit(facts: FactView) -> Blocked | None:
    width, taps = facts["target.hidden"], facts["draft.taps"]
    if taps and all(tap == width for tap in taps):
        return None
    return Blocked(f"the target's hidden rows are {width} wide, the draft reads {taps}", Source.CHECKPOINT)


BUNDLED = (
    _same("embedding rows", "vocab"),
    _same("hidden size", "hidden"),
    _condition("layers", ("target.num_layers", "draft.layers", "draft.num_layers"), Blocks.ALWAYS, _follows_last_layer),
    _condition("taps", ("target.hidden", "draft.taps"), Blocks.ALWAYS, _taps_fit),
    _condition("context", ("schedule.max_model_len", "draft.max_positions"), Blocks.AUTO, _reaches_as_far),
)
"""The same for a draft layer that reads its target's hidden rows and borrows its embedding and head."""


def check_pair(conditions: Sequence[Condition], facts: Mapping[str, Any]) -> PairCheck:
    """Raises PlanError `plan/pair` with every reason why the draft cannot propose for the target."""
    verdicts = evaluate(conditions, facts)
    refused = [v.blocked.reason for v in verdicts if v.blocked and v.condition.blocks is Blocks.ALWAYS]
    if refused:
        raise PlanError(
            "plan/pair",
            f"this draft cannot propose for this target: {refused[0]}.",
            role="draft",
            facts=refused[1:],
            hint="a draft needs its target's tokenizer, id by id; a nextn layer its very target",
        )
    return PairCheck(
        verdicts=tuple(
            PairVerdict(condition=v.condition.id, reason=v.blocked.reason if v.blocked else None, inputs=dict(v.inputs))
            for v in verdicts
        ),
        notes=tuple(Note(condition=v.condition.id, reason=v.blocked.reason) for v in verdicts if v.blocked),
    )


def pair_facts(
    peer: TargetFacts, target: Checkpoint, draft: Checkpoint, spec: DecoderSpec, max_model_len: int
) -> dict[str, Any]:
    return {
        "target.vocab": peer.vocab,
        "target.tokens": tokens_of(target),
        "draft.vocab": spec.vocab,
        "draft.tokens": tokens_of(draft),
        "draft.max_positions": spec.max_positions,
        "schedule.max_model_len": max_model_len,
    }


def tokens_of(checkpoint: Checkpoint) -> TokenTable | None:
    return None if checkpoint.tokenizer is None else TokenTable(token_texts(checkpoint.tokenizer))


def standalone_contract(
    facts: Mapping[str, Any], length: Decision[int], verification: Decision[Verification]
) -> DraftContract:
    """The contract of a draft with its own runner. Its meaningful logits are those of ids that both know."""
    checks = check_pair(STANDALONE, facts)
    return DraftContract(
        algorithm=Algorithm.STANDALONE,
        num_draft_tokens=length,
        measures_length=_measures(length),
        verification=verification,
        draft_vocab=min(facts["draft.tokens"].count, facts["target.vocab"]),
        checks=checks,
        max_positions=_limit(facts),
    )


def bundled_facts(peer: TargetFacts, draft: DraftSpec, own: DecoderSpec, max_model_len: int) -> dict[str, Any]:
    """`own` is the model in the draft's checkpoint: the target, or one that must be like it."""
    decoder = draft.decoder
    return {
        "target.vocab": peer.vocab,
        "target.hidden": peer.hidden,
        "target.num_layers": peer.num_layers,
        "draft.vocab": decoder.vocab,
        "draft.hidden": decoder.hidden,
        "draft.num_layers": len(own.layers),
        "draft.layers": [layer.index for layer in decoder.layers],
        "draft.taps": [tap.width for tap in draft.taps],
        "draft.max_positions": decoder.max_positions,
        "schedule.max_model_len": max_model_len,
    }


def bundled_contract(
    draft: DraftSpec,
    own: DecoderSpec,
    peer: TargetFacts,
    max_model_len: int,
    length: Decision[int],
    verification: Decision[Verification],
) -> DraftContract:
    """The contract of a draft layer beside its target. The head is the target's, so all its logits are meaningful."""
    facts = bundled_facts(peer, draft, own, max_model_len)
    return DraftContract(
        algorithm=draft.algorithm,
        num_draft_tokens=length,
        measures_length=_measures(length),
        verification=verification,
        draft_vocab=peer.vocab,
        checks=check_pair(BUNDLED, facts),
        max_positions=_limit(facts),
        taps=draft.taps,
        borrows=draft.decoder.borrows,
    )


def _limit(facts: Mapping[str, Any]) -> int | None:
    """Positions beyond which nothing is proposed, where the draft reaches less far than requests may."""
    reach = facts["draft.max_positions"]
    return reach if reach < facts["schedule.max_model_len"] else None


def _measures(length: Decision[int]) -> bool:
    """A length that nobody asked for is left to what forwards turn out to cost."""
    return length.requested.is_auto and length.value > 0


def ngram_contract(length: Decision[int], verification: Decision[Verification]) -> DraftContract:
    """N-gram proposals come from the request's own tokens: there is no second runner to agree with."""
    return DraftContract(
        algorithm=Algorithm.NGRAM,
        num_draft_tokens=length,
        measures_length=_measures(length),
        verification=verification,
        draft_vocab=None,
        checks=PairCheck(verdicts=(), notes=()),
    )
