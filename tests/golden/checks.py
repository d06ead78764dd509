"""What the texts of every release rest on: the tensors add up to what others published, and each has its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from proa.cli.headers import uncollected
from proa.loading.dry_run import inspect
from proa.plan.planned import Planned, Resolved
from tests.golden.releases import Stored, stored
from tests.golden.sources import PublicMoE

TOWERS = ("vision_tower.", "mm_projector.", "model.visual.")
COPIES = (".shared_head.head.weight", ".embed_tokens.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One model, written and planned."""

    model: PublicMoE
    root: Path
    kinds: list[Stored]
    plans: dict[str, Resolved]
    accounts: dict[str, dict[str, Any]]

    def parameters(self, starts: tuple[str, ...] = ("",), ends: tuple[str, ...] = ("",)) -> int:
        """Published parameters of the templates that begin and end so."""
        kinds = [kind for kind in self.kinds if kind.template.startswith(starts) and kind.template.endswith(ends)]
        return sum(kind.parameters for kind in kinds)


@contextmanager
def made_of(model: PublicMoE, root: Path, plans: dict[str, Resolved]) -> Iterator[Made]:
    with uncollected():
        accounts = {case: inspect(resolved) for case, resolved in plans.items()}
    yield Made(model=model, root=root, kinds=stored(model.name), plans=plans, accounts=accounts)
    (root / model.name / "model.safetensors").unlink()


def filled(runner: Planned | None) -> int:
    """Elements of all parameters that the runner has for itself."""
    return 0 if runner is None else sum(prod(info.shape) for info in runner.parameters.values())


def check_sources(models: tuple[PublicMoE, ...]) -> None:
    assert len({model.name for model in models}) == len(models)
    for model in models:
        assert model.config and model.names, model.name
        assert model.is_derived == (not model.figures), model.name


def check_figures(made: Made) -> None:
    model, kinds = made.model, made.kinds
    counted = {
        "tensors": sum(len(kind.names) for kind in kinds),
        "payload_bytes": sum(kind.nbytes for kind in kinds),
        "parameters": sum(kind.parameters for kind in kinds),
        "elements": sum(kind.elements for kind in kinds),
    }
    published = {figure: getattr(model, figure) for figure in counted if getattr(model, figure) is not None}
    assert {figure: counted[figure] for figure in published} == published


def check_places(made: Made) -> None:
    total = sum(len(kind.names) for kind in made.kinds)
    for case, account in made.accounts.items():
        runners = account["runners"].values()
        left_out = [runner["tensors"]["left_out"] for runner in runners]
        used = sum(runner["tensors"]["total"] for runner in runners) - sum(left_out)
        assert used + max(left_out) == total, case  # a tower is of no use to either runner
        assert account["unclaimed"] == [], case
        for runner in runners:
            assert (runner["tensors"]["unexpected"], runner["parameters"]["missing"]) == (0, 0), case
            assert (runner["wrong"], runner["config"]["unknown"]) == ([], {}), case


def check_parameters(made: Made) -> None:
    copies = made.parameters(("model.layers.",), COPIES)
    every = made.parameters() - made.parameters(TOWERS)
    for case, resolved in made.plans.items():
        target, draft = filled(resolved.target), filled(resolved.draft)
        if draft or not made.model.has_draft:
            assert target + draft + copies == every, case
        if made.model.main_parameters is not None:
            assert target == made.model.main_parameters, case


def check_drafts(made: Made) -> None:
    copies = sum(kind.template.startswith("model.layers.") and kind.template.endswith(COPIES) for kind in made.kinds)
    for case, resolved in made.plans.items():
        asked = case != made.model.name
        assert (resolved.draft is not None) == (asked and made.model.has_draft), case
        if resolved.draft is not None:
            draft = made.accounts[case]["runners"]["draft"]
            assert (draft["tensors"]["borrowed"], draft["parameters"]["borrowed"]) == (copies, 2), case
