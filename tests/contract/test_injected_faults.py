"""The public GLM-4 NextN fault, put in on purpose: a draft's loader follows what was asked, its decoder the decision.

Each way in which it could come back is written as the patch that would bring it, and is caught: by the proof that the
names fill the model, by the rules on the source, or by the import contracts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proa.arch.blocks import MoESpec
from proa.arch.weights import WeightRule
from proa.errors import WeightError
from proa.plan import resolve
from proa.plan.stored import expert_layout
from proa.units import Role, SharedExperts
from tests.contract.test_source_rules import AFTER_THE_PLAN, SOURCES, intent_reads
from tests.factories.headers import GPU_HOST, LAPTOP, planned
from tests.plan.expert_headers import NEXTN_FAMILIES, write_experts

PACKAGE = Path(__file__).parents[2] / "src" / "proa"


# The fault itself


def as_asked(runner: resolve._Runner) -> list[WeightRule]:
    """The draft's rules for the layout that was asked for, `auto` being no refusal: not for that of its plan."""
    context, layout = runner.context, runner.plan.layout
    if context.role is Role.DRAFT:
        is_fused = context.intent.shared_experts.value is not SharedExperts.SEPARATE
        blocks = {layer.index: layer.ffn for layer in context.spec.layers}
        moe = tuple(
            (index, expert_layout(block, one.files, one.scale_on, is_fused=is_fused))
            for index, one in layout.moe
            if isinstance(block := blocks[index], MoESpec)
        )
        layout = replace(layout, moe=moe)
    return list(context.weights(context.spec, layout))


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(resolve._Runner, "rules", property(as_asked))
        yield


@pytest.mark.parametrize("family", NEXTN_FAMILIES)
def test_names_that_follow_the_ask_do_not_pass_for_those_of_a_draft_that_was_laid_out_otherwise(
    family: str, tmp_path: Path, patched: None
) -> None:
    model = write_experts(tmp_path, family)
    for caps, asks in ((LAPTOP, {}), (GPU_HOST, {"expert_parallel": 2})):  # auto, and separate for a reason
        with pytest.raises(WeightError) as caught:
            planned(model, caps=caps, speculative="nextn", **asks)
        assert caught.value.slug == "weights/partition"
        assert "ffn.shared." in str(caught.value) or "ffn.experts." in str(caught.value)


@pytest.mark.parametrize("ask", ["fused", "separate"])
def test_where_ask_and_decision_agree_the_fault_sleeps(ask: str, tmp_path: Path, patched: None) -> None:
    resolved = planned(write_experts(tmp_path, "glm4_moe"), caps=LAPTOP, speculative="nextn", shared_experts=ask)
    assert resolved.draft is not None


def test_without_the_fault_the_same_plans_are_made(tmp_path: Path) -> None:
    model = write_experts(tmp_path, "glm4_moe")
    for caps, asks in ((LAPTOP, {}), (GPU_HOST, {"expert_parallel": 2})):
        assert planned(model, caps=caps, speculative="nextn", **asks).draft is not None


# The ways to it


def asks_read(tree: ast.Module) -> Iterator[str]:
    """Reads of a runner's intent: `ctx.intent`, `self.context.intent`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "intent" and isinstance(node.ctx, ast.Load):
            yield f"{ast.unparse(node)} (line {node.lineno})"


DECIDES = ("plan/rules/", "plan/context.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE.parent)))
def test_what_a_runner_was_asked_is_read_only_where_its_decisions_are_made(path: Path) -> None:
    if not str(path.relative_to(PACKAGE)).startswith(DECIDES):
        assert list(asks_read(ast.parse(path.read_text()))) == []


PATCHES = {
    "the loader asks the plan what was requested": (
        "loading/ledger.py",
        "self._names = planned.names",
        "self._names = fused_names(planned) if planned.plan.shared_experts.requested.is_auto else planned.names",
        intent_reads,
    ),
    "the layer asks the plan what was requested": (
        "layers/moe.py",
        "self.shared_slots = layout.shared_slots",
        "self.shared_slots = layout.shared_slots if ctx.plan.shared_experts.requested.is_auto else ()",
        intent_reads,
    ),
    "the name map is made from the intent": (
        "plan/resolve.py",
        "return list(self.context.weights(self.context.spec, self.plan.layout))",
        "return list(self.context.weights(self.context.spec, laid_out(self.context.intent.shared_experts)))",
        asks_read,
    ),
    "the parameter table is made from the intent": (
        "plan/runner.py",
        "parameters = decoder_parameters(ctx.spec, plan.layout)",
        "parameters = decoder_parameters(ctx.spec, laid_out(ctx.intent.shared_experts))",
        asks_read,
    ),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_the_rules_on_the_source_name_a_patch_that_brings_the_fault_back(patch: str) -> None:
    file, old, new, rule = PATCHES[patch]
    text = (PACKAGE / file).read_text()
    assert text.count(old) == 1, f"{file} has changed: write the patch anew"
    assert list(rule(ast.parse(text))) == []
    (found,) = rule(ast.parse(text.replace(old, new)))
    assert "requested" in found or "intent" in found
    if rule is intent_reads:
        assert file.partition("/")[0] in AFTER_THE_PLAN
    else:
        assert not file.startswith(DECIDES)
