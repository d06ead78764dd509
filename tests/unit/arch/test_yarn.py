"""YaRN of a config, against numbers that transformers 5.24 computed for the same config (its `yarn` initialiser)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from proa.arch.blocks import RopeKind
from proa.arch.rope import query_scale, rope
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from proa.layers.rope import inverse_frequencies

V3 = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SLOW = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
BARE = {key: value for key, value in V3.items() if key not in SLOW}
# Every third of the 32 frequencies of dimension 64 at theta 10000, and what multiplies cos and sin.
RELEASED: list[tuple[dict[str, Any], float, list[float]]] = [
    (
        V3,
        1.0,
        [1.0, 4.21696514e-01, 1.77827939e-01, 7.49894157e-02, 2.68793609e-02, 8.33450910e-03, 2.24936521e-03,
         4.14990413e-04, 2.49999994e-05, 1.05424124e-05, 4.44569832e-06],
    ),
    (
        BARE | {"factor": 4.0},
        1.138629436111989,
        [1.0, 4.21696514e-01, 1.77827939e-01, 7.49894157e-02, 2.79739965e-02, 9.48851742e-03, 3.02799162e-03,
         8.66463524e-04, 2.50000012e-04, 1.05424122e-04, 4.44569851e-05],
    ),
    (
        BARE | {"factor": 32.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        1.3465735902799727,
        [1.0, 4.21696514e-01, 1.77827939e-01, 7.49894157e-02, 2.77359355e-02, 8.47757421e-03, 2.21770303e-03,
         3.62845632e-04, 3.12500015e-05, 1.31780153e-05, 5.55712313e-06],
    ),
    (
        V3 | {"factor": 64.0, "beta_fast": 1.0, "mscale_all_dim": 0.5},
        1.1721471588322,
        [1.0, 4.21696514e-01, 1.77827939e-01, 7.49894157e-02, 3.16227786e-02, 1.33352149e-02, 5.62341325e-03,
         2.37137382e-03, 1.56250007e-05, 6.58900763e-06, 2.77856157e-06],
    ),
]  # fmt: skip


def config(scaling: dict[str, Any]) -> HFView:
    values = {"rope_theta": 10000, "max_position_embeddings": 163840, "rope_scaling": scaling}
    return HFView(values, where="config.json")


@pytest.mark.parametrize(("scaling", "magnitude", "frequencies"), RELEASED)
def test_frequencies_and_magnitude_are_those_of_transformers(
    scaling: dict[str, Any], magnitude: float, frequencies: list[float]
) -> None:
    spec = rope(config(scaling), 64)
    assert spec.kind is RopeKind.YARN and spec.yarn is not None
    assert spec.yarn.magnitude == pytest.approx(magnitude, rel=1e-12)
    assert inverse_frequencies(spec, None).tolist()[::3] == pytest.approx(frequencies, rel=2e-6)


def test_the_mixed_range_lies_between_the_pairs_that_turn_often_and_seldom_enough() -> None:
    """Peng et al. 2023: pairs above `beta_fast` turns keep their frequency, those below `beta_slow` are slowed."""
    spec = rope(config(V3), 64)
    for pair, frequency in enumerate(inverse_frequencies(spec, None).tolist()):
        plain = 10000 ** (-2 * pair / 64)
        turns = 4096 * plain / (2 * math.pi)
        if turns > 32 * 1.4:  # the bounds are whole pairs: a pair next to the exact bound is already in the range
            assert frequency == pytest.approx(plain)
        elif turns < 1 / 1.4:
            assert frequency == pytest.approx(plain / 40)
        else:
            assert plain / 40.0001 <= frequency <= plain * 1.0001


def test_a_stated_attention_factor_is_the_magnitude() -> None:
    spec = rope(config(V3 | {"attention_factor": 1.25}), 64)
    assert spec.yarn is not None and spec.yarn.magnitude == 1.25


def test_a_missing_factor_is_the_ratio_of_the_two_context_lengths() -> None:
    without = {key: value for key, value in V3.items() if key != "factor"}
    assert rope(config(without), 64).factor == 40.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings is null"),
        ({"factor": 0}, "factor = 0 must be greater"),
        ({"beta_fast": 1, "beta_slow": 32}, "beta_fast >= beta_slow"),
        ({"attention_factor": -1.0}, "attention_factor > 0"),
        ({"long_factor": [1.0]}, "long_factor"),
        ({"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
    ],
)
def test_a_parameter_without_code_or_sense_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rope(config(V3 | change), 64)


def test_query_scaling_is_read_from_the_rope_object() -> None:
    found = query_scale(config(V3 | {"llama_4_scaling_beta": 0.1}))
    assert found is not None and (found.beta, found.original) == (0.1, 4096)
    assert query_scale(config(V3)) is None
    with pytest.raises(ConfigError, match="must not be negative"):
        query_scale(config(V3 | {"llama_4_scaling_beta": -0.1}))
