"""Every tensor of the reference checkpoints of hybrid families has one owner, and the rules fill every parameter.

Names only: the checkpoints were written by another program, plain, in block FP8, and FP8 beside a plain draft.
PROA_ORACLES names their directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from proa.arch.decoder import DecoderSpec
from proa.arch.family import Weights
from proa.arch.layout import ExpertFiles
from proa.arch.parameters import decoder_parameters
from proa.arch.registry import Reading, read_config
from proa.arch.weights import LeftOut, NameMap, Place, Unknown
from proa.checkpoint.open import open_checkpoint
from proa.checkpoint.types import TensorInfo
from tests.factories.hybrid_checkpoints import HYBRID_FAMILIES, hybrid_shapes
from tests.factories.layouts import layout_of

pytestmark = pytest.mark.oracle


def checkpoints(root: Path, family: str) -> list[Path]:
    """Plain and quantised forms, in whatever folders of the directory they lie."""
    found = sorted(file.parent for file in root.rglob("config.json") if file.parent.name == family)
    if not found:
        pytest.skip(f"PROA_ORACLES has no {family}")
    return found


def names_of(
    spec: DecoderSpec, weights: Weights, files: ExpertFiles, prefixes: Mapping[str, str] | None = None
) -> NameMap:
    stacked = [layer.index for layer in spec.layers] if files is ExpertFiles.STACKED else []
    layout = layout_of(spec, fused=(), stacked=stacked)
    names = NameMap(weights(spec, layout), prefixes)
    names.check(decoder_parameters(spec, layout))
    return names


def files_of(tensors: Mapping[str, TensorInfo], prefix: str) -> ExpertFiles:
    """How a runner's experts are stored: its tensors begin with `prefix`."""
    is_stacked = any(name.startswith(prefix) and name.endswith("experts.gate_up_proj") for name in tensors)
    return ExpertFiles.STACKED if is_stacked else ExpertFiles.LISTED


def maps(reading: Reading, tensors: Mapping[str, TensorInfo]) -> list[NameMap]:
    """The target's, then its bundled drafts'."""
    target = names_of(reading.spec, reading.weights, files_of(tensors, "model."), reading.prefixes)
    drafts = (
        names_of(draft.decoder, reading.family.drafts[algorithm].weights, files_of(tensors, "mtp."))
        for algorithm, draft in reading.drafts.items()
    )
    return [target, *drafts]


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_every_tensor_of_a_reference_checkpoint_has_one_owner(family: str, oracle_dir: Path) -> None:
    for path in checkpoints(oracle_dir, family):
        checkpoint = open_checkpoint(path)
        reading = read_config(checkpoint.config)
        owned = maps(reading, checkpoint.tensors)
        assert dict(reading.report.unknown) == {}
        for name, info in checkpoint.tensors.items():
            claims = [claim for names in owned if not isinstance(claim := names.claim(name), Unknown)]
            assert len(claims) == 1, f"{path}: {name}: {claims}"
            assert isinstance(claims[0], Place) or (isinstance(claims[0], LeftOut) and ".visual." in name), name
            if isinstance(claims[0], Place) and claims[0].group == name:
                assert claims[0].shape == info.shape, name
        expected = {name for names in owned for name in names.expected()}
        assert expected <= set(checkpoint.tensors), path


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_the_factory_of_tiny_checkpoints_names_what_the_reference_has(family: str, oracle_dir: Path) -> None:
    for path in checkpoints(oracle_dir, family):
        if path.parent.name != "plain":
            continue
        checkpoint = open_checkpoint(path)
        config = {key: checkpoint.config.get(key, None) for key in checkpoint.config.keys()}  # noqa: SIM118  (HFView)
        made = {name: shape for name, shape in hybrid_shapes(config).items() if ".visual." not in name}
        assert made == {name: info.shape for name, info in checkpoint.tensors.items() if ".visual." not in name}
