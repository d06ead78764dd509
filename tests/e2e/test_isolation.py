"""What a runner is never depends on another: order of loading, a failed neighbour, other engines on other threads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from proa import LLM, SamplingParams, WeightError
from proa.config.load import load_config
from proa.loading.build import build
from proa.loading.progress import Silent
from proa.plan.planned import Planned, Resolved
from proa.plan.prepare import prepare
from proa.runner.batch import RowSpan
from proa.runner.describe import promised
from proa.runner.runner import Runner
from proa.units import Phase
from tests.factories.native import probed

FOUND = probed()  # where native kernels run, the target is native and the draft, for its cache, is not
PAGES = 16
PROMPT = tuple(range(20, 51))
Facts = tuple[str, dict[str, Any], torch.Tensor, dict[str, int]]


@pytest.fixture(scope="module")
def resolved(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resolved]:
    """A pair whose two runners differ in family, types and cache geometry."""
    api = {
        "draft": {"path": str(tiny("qwen3", seed=4)), "kv_dtype": "bfloat16", "page_size": 4},
        "dtype": "float32",
        "threads": 1,
    }
    config = load_config(str(tiny("llama")), flags={}, file=None, environ={}, api=api)
    yield prepare(
        config, cache_dir=tmp_path_factory.mktemp("cache"), online=False, note=lambda text: None, caps=FOUND.caps
    )


def built(planned: Planned) -> Runner:
    one = build(planned, Silent(), FOUND.library, target=None)
    return Runner(planned.plan, planned.spec, one.model, one.ledger, PAGES, gives_hidden=False)


def facts(runner: Runner) -> Facts:
    """Digest, description, logits of a prompt in two chunks and of a verified run, and how often each kernel ran."""
    logits = []
    for start, stop, phase in ((0, 9, Phase.PREFILL), (9, 27, Phase.PREFILL), (27, 31, Phase.VERIFY)):
        runner.tables.mark()
        runner.tables.reserve(1, stop - start)
        rows = RowSpan(
            phase=phase,
            tokens=PROMPT[start:stop],
            start=start,
            pages=runner.tables.pages(1),
            logits=range(stop - start),
        )
        logits.append(runner.forward([rows]).logits)
        runner.tables.keep({1: stop - start})
    return runner.plan.digest, runner.describe(), torch.cat(logits), runner.kernel_calls()


def assert_equal(one: Facts, other: Facts) -> None:
    assert (one[0], one[1], one[3]) == (other[0], other[1], other[3])
    assert torch.equal(one[2], other[2])


def test_a_built_runner_is_what_its_plan_said(resolved: Resolved) -> None:
    for planned in resolved.runners:
        description = built(planned).describe()
        assert description == promised(planned.plan, planned.spec, planned.parameters, PAGES)
    assert description["kv_dtype"] != built(resolved.target).describe()["kv_dtype"]


def test_the_order_of_loading_changes_nothing(resolved: Resolved) -> None:
    target, draft = resolved.runners
    first = [built(target), built(draft)]
    second = [built(draft), built(target)]
    assert_equal(facts(first[0]), facts(second[1]))
    assert_equal(facts(first[1]), facts(second[0]))


def test_a_draft_that_fails_to_load_leaves_the_target_as_it_was(
    resolved: Resolved, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    before = facts(built(resolved.target))
    broken = shutil.copytree(tiny("qwen3", seed=4), tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = torch.zeros(2)
    save_file(tensors, broken / "model.safetensors")
    api = {"draft": str(broken), "dtype": "float32", "threads": 1}
    config = load_config(str(tiny("llama")), flags={}, file=None, environ={}, api=api)
    pair = prepare(config, cache_dir=tmp_path, online=False, note=lambda text: None, caps=None)
    target = built(pair.target)
    assert pair.draft is not None
    with pytest.raises(WeightError, match=r"model\.layers\.0\.extra\.weight"):
        built(pair.draft)
    assert_equal(facts(target), before)
    assert_equal(facts(built(resolved.target)), before)


def test_a_draft_and_no_draft_give_the_target_the_same_plan(
    resolved: Resolved, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    alone = load_config(str(tiny("llama")), flags={}, file=None, environ={}, api={"dtype": "float32", "threads": 1})
    plan = prepare(alone, cache_dir=tmp_path, online=False, note=lambda text: None, caps=None).plans.target
    assert plan.digest == resolved.plans.target.digest


def test_runners_built_and_run_on_two_threads_are_what_they_are_alone(resolved: Resolved) -> None:
    alone = [facts(built(planned)) for planned in resolved.runners]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda planned: facts(built(planned)), resolved.runners))
    for one, other in zip(alone, together, strict=True):
        assert_equal(one, other)


def test_two_engines_on_two_threads_answer_as_each_does_alone(tiny: Callable[..., Path]) -> None:
    settings = {"dtype": "float32", "threads": 1, "max_model_len": 128}
    pairs = [(tiny("llama"), tiny("qwen3", seed=4)), (tiny("qwen2"), None)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=16, logprobs=1)

    def serve(pair: tuple[Path, Path | None]) -> tuple[Any, ...]:
        with LLM(pair[0], draft=pair[1], **settings) as llm:
            outputs = [output.outputs for output in llm.generate([[10, 11], [40] * 9], params)]
            explained = llm.explain()
            return outputs, explained["runners"], explained["digest"], llm.descriptions(), llm.ledger()

    alone = [serve(pair) for pair in pairs]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(serve, pairs))
    for one, other in zip(together, alone, strict=True):
        for part, wanted in zip(one, other, strict=True):
            assert part == wanted
