"""What the sampling pipeline knows of one request: its parameters and the keys of its noise. Torch-free, frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proa.errors import RequestError
from proa.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingState:
    """Fixed at admission and kept through preemption.

    `seed` is 64 bits (drawn fresh where the request gave none), `choice` the index among `n`. `stop_ids` are the token
    ids that end the request (EOS unless ignored, and stop_token_ids); they are masked while fewer than
    `params.min_tokens` tokens are out. `bad_sequences` are `params.bad_words` as token ids: the last token of each is
    masked wherever the output ends with the tokens before it.
    """

    params: SamplingParams
    seed: int
    choice: int
    prompt: Sequence[int]
    stop_ids: frozenset[int]
    bad_sequences: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.params.bad_words and not self.bad_sequences:
            raise ValueError("bad_words were not turned into bad_sequences of token ids")
        if not all(self.bad_sequences):
            raise ValueError("a bad sequence without a token matches everywhere")
        allowed = self.params.allowed_token_ids
        if allowed is not None and self.params.min_tokens and self.stop_ids.issuperset(allowed):
            raise RequestError(
                "request/nothing-to-sample",
                "allowed_token_ids holds only tokens that end the request, and min_tokens forbids those.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One row of logits to sample from. `output`: the request's tokens after its prompt; `proposed`: those that follow
    them up to this row. The token to emit takes absolute position `len(prompt) + num_output`."""

    state: SamplingState
    output: Sequence[int]
    proposed: Sequence[int] = ()

    @property
    def num_output(self) -> int:
        return len(self.output) + len(self.proposed)

    @property
    def position(self) -> int:
        return len(self.state.prompt) + self.num_output

    @property
    def tokens(self) -> Sequence[int]:
        """All of the output, proposed ones included."""
        return [*self.output, *self.proposed] if self.proposed else self.output
