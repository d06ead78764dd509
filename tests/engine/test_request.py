from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.engine.request import Status
from tests.engine.table_model import request

ALLOWED = {
    (Status.WAITING, Status.RUNNING),
    (Status.RUNNING, Status.PREEMPTED),
    (Status.PREEMPTED, Status.RUNNING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.FINISHED),
    (Status.PREEMPTED, Status.FINISHED),
}


@pytest.mark.parametrize("before", Status)
@pytest.mark.parametrize("after", Status)
def test_a_request_moves_only_along_its_states(before: Status, after: Status):
    asked = request(3, [1])
    asked.status = before
    if (before, after) in ALLOWED:
        asked.become(after)
        assert asked.status is after
    else:
        with pytest.raises(RuntimeError, match=f"request 3 is {before.value} and cannot become {after.value}"):
            asked.become(after)
        assert asked.status is before


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9)), st.data())
def test_tokens_are_any_slice_of_prompt_and_output(prompt: list[int], output: list[int], data: st.DataObject):
    asked = request(0, prompt)
    asked.output += output
    start = data.draw(st.integers(0, len(prompt + output)))
    stop = data.draw(st.integers(start, len(prompt + output)))
    assert asked.tokens(start, stop) == tuple((prompt + output)[start:stop])
    assert asked.num_tokens == len(prompt + output)


@pytest.mark.parametrize(("output", "rows"), [([], 4), ([7], 4), ([7, 8, 9], 6)])
def test_prefill_fills_the_prompt_or_all_before_the_anchor(output: list[int], rows: int):
    asked = request(0, [1, 2, 3, 4])
    asked.output += output
    assert asked.prefill_rows == rows


@pytest.mark.parametrize(("max_tokens", "most"), [(5, 5), (6, 6), (7, 6), (None, 6)])
def test_the_output_is_limited_by_what_was_asked_and_by_the_model_length(max_tokens: int | None, most: int):
    assert request(0, [1, 2, 3, 4], max_tokens=max_tokens).max_output(10) == most
