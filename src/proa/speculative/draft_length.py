"""How many proposed tokens each request of a step has verified: a fixed number, or what measured costs make worthwhile.

Decisions read the verdicts of earlier steps and never a token that they judge, so they change no distribution; under
coupled verification they change no token. Owns lengths, not what is proposed and not what is accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from proa.kernels.cost import CostTable
from proa.speculative.acceptance import Acceptance
from proa.speculative.protocol import DraftContext, Proposal, RequestVerdict, Verdict

MIN_CHANCE = 0.05
"""A token that is less likely right is not worth what its row costs outside of the forward."""
PROBE_AFTER, PROBE_AT_MOST = 16, 1024
"""Steps of decisions for 0 before one token is tried again; doubled whenever that one is wrong."""
QUIET_AFTER, LOOK_EVERY = 16, 4
"""Steps without a proposal, after which a request's text is looked at in every fourth only: finding nothing takes 0.2
ms of a step, and what is found at last begins three tokens later at worst."""
WINDOW = 64
"""Steps of decisions for 0 in a row, over all requests, from which on speculation is said not to pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The step without proposals: `decoding` requests with one row each, and `prefill` rows of prompts beside them."""

    decoding: int
    prefill: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Measured costs of both runners. `draft` None: proposals cost nothing to make."""

    target: CostTable
    draft: CostTable | None

    def verify(self, step: Step, proposed: int) -> float:
        """Seconds of the target for the decoding requests with that many proposed tokens in all.

        Prompt rows have their own worth, so they are no cost here; but they make each further row dearer or cheaper.
        """
        rows = step.decoding + step.prefill
        alone = self.target.of(rows) - self.target.of(step.decoding)
        return self.target.of(rows + proposed) - alone

    def propose(self, requests: int) -> float:
        """Seconds to draft one more token for each of `requests` requests at once."""
        return 0.0 if self.draft is None else self.draft.of(requests)


def best_lengths(survival: Sequence[Sequence[float]], step: Step, costs: StepCosts) -> list[int]:
    """The lengths with the most expected tokens per second of the step; of equal ones the shortest. 0 is among them.

    `survival[b][i]`: the chance that tokens 0 to i of request b's proposal are all right; it never rises with i. So the
    best n tokens over all requests are the n likeliest, and each n is tried.
    """
    likely = [(chance, index) for index, row in enumerate(survival) for chance in row if chance >= MIN_CHANCE]
    likely.sort(key=lambda entry: -entry[0])
    lengths = [0] * len(survival)
    best, tokens, drafting = list(lengths), float(step.decoding), 0.0
    rate = tokens / costs.verify(step, 0)
    reaching: Counter[int] = Counter()
    for proposed, (chance, index) in enumerate(likely, start=1):
        lengths[index] += 1
        reaching[lengths[index]] += 1
        at_once = reaching[lengths[index]]
        drafting += costs.propose(at_once) - costs.propose(at_once - 1)
        tokens += chance
        found = tokens / (costs.verify(step, proposed) + drafting)
        if found > rate * (1 + 1e-9):  # not by rounding alone
            best, rate = list(lengths), found
    return best


class DraftLengths(Protocol):
    """What the engine asks, in this order, once per step. A step that failed is asked again and answered the same."""

    @property
    def pays(self) -> bool:
        """False once proposals were found to cost more than they bring."""
        ...

    def limits(self, useful: Mapping[int, int], step: Step) -> dict[int, int]:
        """How many tokens to propose at most, by request id. `useful`: how many are of use, 0 included."""
        ...

    def cut(self, context: DraftContext, proposal: Proposal, step: Step) -> Proposal:
        """The part of the proposal that is to be verified."""
        ...

    def record(self, verdict: Verdict) -> None:
        """The step is kept."""
        ...

    def release(self, request_ids: Sequence[int]) -> None:
        """Forget these requests."""
        ...

    def metrics(self) -> dict[str, Any]:
        """For `stats()`."""
        ...


class FixedLengths:
    """Always as many as are of use, up to `longest`."""

    def __init__(self, longest: int) -> None:
        self._longest = longest

    @property
    def pays(self) -> bool:
        return True

    def limits(self, useful: Mapping[int, int], step: Step) -> dict[int, int]:
        return {request_id: min(limit, self._longest) for request_id, limit in useful.items()}

    def cut(self, context: DraftContext, proposal: Proposal, step: Step) -> Proposal:
        return proposal

    def record(self, verdict: Verdict) -> None:
        """Nothing to learn."""

    def release(self, request_ids: Sequence[int]) -> None:
        """Nothing is kept."""

    def metrics(self) -> dict[str, Any]:
        return {"mode": "fixed", "longest": self._longest}


@dataclass(frozen=True, slots=True)
class _Choice:
    kind: int
    length: int
    is_probe: bool


@dataclass(slots=True)
class _Track:
    """One request: its own acceptance, by kind of evidence how often in a row 0 was chosen, and for how many steps
    nothing was proposed."""

    acceptance: Acceptance
    idle: Counter[int] = field(default_factory=Counter[int])
    quiet: int = 0

    @property
    def stride(self) -> int:
        """In how many steps a free drafter looks once."""
        return 1 if self.quiet < QUIET_AFTER else LOOK_EVERY


class MeasuredLengths:
    """From the cost tables and a running estimate of acceptance, per request and over all of them.

    A drafter that costs nothing proposes in full and is cut by the evidence that it gives; a draft model is told before
    it runs how far to go. State changes in `record` and `release` only.
    """

    def __init__(self, *, longest: int, costs: StepCosts, prior: Sequence[float], note: Callable[[str], None]) -> None:
        self._longest = longest
        self._costs = costs
        self._note = note
        self._prior = tuple(prior)
        self._all = Acceptance(prior, above=None, weight=8, memory=256)
        self._tracks: dict[int, _Track] = {}
        self._chosen: dict[int, _Choice] = {}
        self._histogram: Counter[int] = Counter()
        self._probes = 0
        self._wait = PROBE_AFTER
        self._unpaid = 0
        self._has_told = False

    @property
    def pays(self) -> bool:
        return self._unpaid < WINDOW

    def limits(self, useful: Mapping[int, int], step: Step) -> dict[int, int]:
        self._chosen = {}
        capped = {request_id: min(limit, self._longest) for request_id, limit in useful.items()}
        if self._costs.draft is None:
            tracks = {key: self._track(key) for key in capped}
            return {key: 0 if tracks[key].quiet % tracks[key].stride else limit for key, limit in capped.items()}
        return capped | self._choose({key: (1, limit) for key, limit in capped.items() if limit}, step)

    def cut(self, context: DraftContext, proposal: Proposal, step: Step) -> Proposal:
        if self._costs.draft is not None:
            return proposal
        ids = [request.request_id for request in context.requests]
        kinds = proposal.evidence or (1,) * len(ids)
        made = zip(ids, kinds, proposal.tokens, strict=True)
        chosen = self._choose({key: (kind, len(tokens)) for key, kind, tokens in made if tokens}, step)
        lengths = [chosen.get(key, 0) for key in ids]
        probs = proposal.probs and tuple(
            rows if rows is None else rows[:length] for rows, length in zip(proposal.probs, lengths, strict=True)
        )
        tokens = tuple(tokens[:length] for tokens, length in zip(proposal.tokens, lengths, strict=True))
        return replace(proposal, tokens=tokens, probs=probs)

    def record(self, verdict: Verdict) -> None:
        for entry in verdict.requests:
            track = self._track(entry.request_id)
            track.quiet = 0 if entry.proposed else track.quiet + 1
            choice = self._chosen.pop(entry.request_id, None)
            if choice is not None:
                self._learn(entry, choice)
        if not self.pays and not self._has_told:
            self._has_told = True
            self._note(
                f"speculative/does-not-pay: verifying proposals costs more than it brings here ({self._costs.target}); "
                "decoding plainly, with a try now and then"
            )

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._tracks.pop(request_id, None)
            self._chosen.pop(request_id, None)

    def metrics(self) -> dict[str, Any]:
        """`histogram[n]`: decisions for n tokens. `pays`: not only zeros lately. `costs`: digests of the tables."""
        decisions = self._histogram.total()
        tables = {"target": self._costs.target, "draft": self._costs.draft}
        return {
            "mode": "measured",
            "longest": self._longest,
            "mean": sum(length * times for length, times in self._histogram.items()) / decisions if decisions else 0.0,
            "histogram": [self._histogram[length] for length in range(self._longest + 1)],
            "probes": self._probes,
            "pays": self.pays,
            "costs": {role: table and table.digest for role, table in tables.items()},
        }

    def _choose(self, wanted: Mapping[int, tuple[int, int]], step: Step) -> dict[int, int]:
        """Lengths by request id, for (kind of evidence, limit) of each."""
        if not wanted:
            return {}
        tracks = [self._track(request_id) for request_id in wanted]
        survival = [track.acceptance.survival(*want) for track, want in zip(tracks, wanted.values(), strict=True)]
        lengths = best_lengths(survival, step, self._costs)
        choices = [_Choice(kind, length, False) for (kind, _), length in zip(wanted.values(), lengths, strict=True)]
        due = [i for i, one in enumerate(choices) if not one.length and tracks[i].idle[one.kind] >= self._wait]
        # One at a time, and none where it could not pay even if every token were right.
        if due and any(best_lengths([[1.0] * limit for _, limit in wanted.values()], step, self._costs)):
            choices[due[0]] = _Choice(choices[due[0]].kind, 1, True)
        self._chosen = dict(zip(wanted, choices, strict=True))
        return {request_id: choice.length for request_id, choice in self._chosen.items()}

    def _track(self, request_id: int) -> _Track:
        if request_id not in self._tracks:
            self._tracks[request_id] = _Track(Acceptance(self._prior, above=self._all, weight=4, memory=64))
        return self._tracks[request_id]

    def _learn(self, entry: RequestVerdict, choice: _Choice) -> None:
        track = self._track(entry.request_id)
        # A decision stands for the steps in which nobody looked.
        steps = track.stride if self._costs.draft is None else 1
        self._histogram[choice.length] += 1
        self._probes += choice.is_probe
        if choice.length:
            track.idle[choice.kind] = 0
        else:
            track.idle[choice.kind] += steps
        if not choice.is_probe:
            self._unpaid = 0 if choice.length else self._unpaid + steps
        if not entry.proposed:
            return
        if choice.is_probe:
            self._wait = PROBE_AFTER if entry.accepted else min(2 * self._wait, PROBE_AT_MOST)
        # A request may end within its accepted tokens; then nothing was rejected.
        is_rejected = entry.accepted < entry.proposed and len(entry.emitted) > entry.accepted
        for acceptance in (track.acceptance, self._all):
            acceptance.record(choice.kind, accepted=entry.accepted, is_rejected=is_rejected)
