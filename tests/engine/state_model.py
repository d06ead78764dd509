"""The engine tests' model with states: what it says depends on every token before, and on how its row was computed.

A slot holds the tokens that its state stands for, each with whether it was computed in a whole block of a prefill. So a
row that was rolled back wrongly, resumed from another's state, or computed by blocks where it should have been computed
alone, shows in the output, or raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proa.arch.delta_blocks import BLOCK
from proa.cache.state import StateTables
from proa.cache.state_values import NONE, Replay, StateRoom
from proa.cache.transaction import Participant
from proa.engine.request import Request
from proa.kernels.reference.sample import ReferenceSample
from proa.runner.batch import ForwardOutput, RowSpan
from proa.sampling.noise import Purpose
from proa.sampling.sampler import sample
from proa.sampling.state import SamplingRow
from proa.speculative.protocol import DraftContext, Proposal
from proa.units import DType, Phase
from tests.engine.table_model import VOCAB, Broken, GuessingDrafter, TableRunner, next_logits

State = tuple[tuple[int, bool], ...]
"""Tokens, each with whether it was computed in a block."""


def logits_of(state: State, weights: int = 0) -> torch.Tensor:
    return next_logits([token + 500 * in_block for token, in_block in state], weights)


def state_of(prompt: Sequence[int], output: Sequence[int]) -> State:
    """As it should be: whole blocks of the prompt by blocks, the rest of it and what follows row by row."""
    by_blocks = len(prompt) // BLOCK * BLOCK
    return tuple((token, row < by_blocks) for row, token in enumerate([*prompt, *output]))


def expected_with_states(asked: Request, weights: int = 0) -> list[int]:
    """The output of a request on its own, without an engine."""
    output: list[int] = []
    while len(output) < asked.sampling.params.max_tokens:
        row = SamplingRow(state=asked.sampling, output=output)
        logits = logits_of(state_of(asked.prompt, output), weights)[None]
        output += sample(ReferenceSample(), logits, [row], [0], Purpose.TOKEN)
        if output[-1] in asked.sampling.stop_ids:
            break
    return output


class StateRunner(TableRunner):
    """`tells_blocks` False: what it says depends on tokens alone, as of a draft of a model without states."""

    def __init__(self, *, slots: int, kept_rows: int, tells_blocks: bool = True, **settings) -> None:
        super().__init__(**settings)
        self.states = StateTables(StateRoom(slots=slots, kept_rows=kept_rows), DType.F32, self._replay)
        self.tells_blocks = tells_blocks
        self.num_replays = 0
        self._held: dict[int, State] = {}
        self._kept: dict[int, int] = {}

    @property
    def participants(self) -> tuple[Participant, ...]:
        return (self.tables, self.states)

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput:
        output = super().forward(spans)
        before = [self._source(span) for span in spans]
        rows = [row for span, state in zip(spans, before, strict=True) for row in self._advance(span, state)]
        if rows and self.tells_blocks:
            return ForwardOutput(logits=torch.stack(rows), hidden=output.hidden)
        return output

    def _source(self, span: RowSpan) -> State:
        assert span.state is not None
        assert (span.state.source == NONE) == (span.start == 0)
        assert span.phase is not Phase.PREFILL or span.start % BLOCK == 0, "a prompt was cut within a block"
        state = self._held[span.state.source] if span.start else ()
        assert [token for token, _ in state] == self._read(span, span.start), "not the state of these rows"
        return state

    def _advance(self, span: RowSpan, state: State) -> list[torch.Tensor]:
        """The logits that the span wants."""
        last_block = span.end // BLOCK * BLOCK if span.phase is Phase.PREFILL else 0
        wanted = []
        for index, token in enumerate(span.tokens):
            row = span.start + index
            state = (*state, (token, row < last_block))
            if span.state.targets[index] != NONE:
                assert row >= last_block or (row + 1) % BLOCK == 0, "a state within a block"
                self._held[span.state.targets[index]] = state
            if span.state.kept[index] != NONE:
                self._kept[span.state.kept[index]] = token
            if index in span.logits:
                wanted.append(logits_of(state, self.weights))
        return wanted

    def _replay(self, replays: Sequence[Replay]) -> None:
        self.num_replays += len(replays)
        if self.num_forwards + 1000 in self.fails_at:
            raise Broken(f"replay after forward {self.num_forwards}")
        for one in replays:
            state = () if one.source == NONE else self._held[one.source]
            self._held[one.target] = (*state, *((self._kept[row], False) for row in one.kept))


class KnowingDrafter(GuessingDrafter):
    """Guesses what a model with states will say."""

    def propose(self, context: DraftContext) -> Proposal:
        return Proposal(tokens=tuple(self._tokens(entry.sampling.prompt, entry) for entry in context.requests))

    def _tokens(self, prompt: tuple[int, ...], entry) -> tuple[int, ...]:
        output = list(entry.tokens[len(prompt) :])
        first = len(output)
        for _ in range(self._random.randint(0, entry.limit)):
            is_good = self._random.random() < self._skill
            token = int(logits_of(state_of(prompt, output)).argmax()) if is_good else self._random.randrange(VOCAB)
            output.append(token)
        return tuple(output[first:])
