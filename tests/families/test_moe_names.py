"""Every tensor of the reference checkpoints of MoE families has one owner, and no expected one is missing.

Names only: the checkpoints were written by another program. PROA_ORACLES names their directory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proa.arch.registry import Reading, read_config
from proa.arch.weights import NameMap, Place, Unknown
from proa.checkpoint.open import open_checkpoint
from proa.checkpoint.types import Checkpoint
from tests.factories.layouts import layout_of
from tests.factories.moe_checkpoints import MOE_FAMILIES

pytestmark = pytest.mark.oracle


def checkpoints(root: Path, family: str) -> list[Path]:
    """Plain and quantised forms, in whatever folders of the directory they lie."""
    return sorted(file.parent for file in root.rglob("config.json") if file.parent.name == family)


def maps(reading: Reading) -> tuple[NameMap, list[NameMap]]:
    """The target's and its bundled drafts'."""
    target = NameMap(reading.weights(reading.spec, layout_of(reading.spec, fused=())), reading.prefixes)
    drafts = [
        NameMap(reading.family.drafts[algorithm].weights(draft.decoder, layout_of(draft.decoder, fused=())))
        for algorithm, draft in reading.drafts.items()
    ]
    return target, drafts


def faults(checkpoint: Checkpoint, target: NameMap, drafts: list[NameMap]) -> list[str]:
    found: list[str] = []
    for name, info in checkpoint.tensors.items():
        owners = [claim for names in (target, *drafts) if not isinstance(claim := names.claim(name), Unknown)]
        wrong = [claim for claim in owners if isinstance(claim, Place) and claim.group == name]
        if len(owners) != 1:
            found.append(f"{name}: {len(owners)} owners")
        found += [f"{name}: {claim.shape} is not {info.shape}" for claim in wrong if claim.shape != info.shape]
    expected = {name for names in (target, *drafts) for name in names.expected()}
    return found + [f"{name}: missing" for name in sorted(expected - set(checkpoint.tensors))]


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_tensor_of_a_reference_checkpoint_has_one_owner(family: str, oracle_dir: Path) -> None:
    paths = checkpoints(oracle_dir, family)
    if not paths:
        pytest.skip(f"PROA_ORACLES has no {family}")
    for path in paths:
        checkpoint = open_checkpoint(path)
        target, drafts = maps(read_config(checkpoint.config))
        assert faults(checkpoint, target, drafts) == []
