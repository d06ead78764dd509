"""What config.json says about quantised weights (QuantSpec), and in which form one weight is stored. Torch-free.

Which weights are quantised is told by the tensors that are there, module by module; the config only says how.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from proa.units import DType


class Form(Enum):
    """How the values of one weight are stored."""

    __hash__ = object.__hash__  # as units.DType

    PLAIN = "plain"
    FP8_BLOCK = "block FP8"
    FP8_SCALED = "FP8 with one scale per tensor or row"
    INT4 = "int4 in groups"


FORM_MEMBERS: Mapping[Form, tuple[str, ...]] = MappingProxyType(
    {
        Form.PLAIN: ("weight",),
        Form.FP8_BLOCK: ("weight", "weight_scale_inv"),
        Form.FP8_SCALED: ("weight", "weight_scale"),
        Form.INT4: ("weight_packed", "weight_scale", "weight_shape"),
    }
)
"""The tensors of a weight's source group."""

_FLOATS = frozenset({DType.F32, DType.F16, DType.BF16})
_MEMBER_DTYPES: Mapping[tuple[Form, str], frozenset[DType]] = MappingProxyType(
    {
        (Form.FP8_BLOCK, "weight"): frozenset({DType.F8_E4M3}),
        (Form.FP8_BLOCK, "weight_scale_inv"): frozenset({DType.F32, DType.BF16}),
        (Form.FP8_SCALED, "weight"): frozenset({DType.F8_E4M3}),
        (Form.FP8_SCALED, "weight_scale"): _FLOATS,
        (Form.INT4, "weight_packed"): frozenset({DType.I32}),
        (Form.INT4, "weight_scale"): _FLOATS,
        (Form.INT4, "weight_shape"): frozenset({DType.I64, DType.I32}),
    }
)

# Method -> whether its config is read further. The others are known by name only: nothing runs them yet.
_READ = frozenset({"fp8", "compressed-tensors"})
_NAMED = frozenset(
    (
        "aqlm", "auto-round", "awq", "bitnet", "bitsandbytes", "eetq", "exl2", "fbgemm_fp8", "gptq", "higgs", "hqq",
        "modelopt", "modelopt_fp4", "modelopt_mixed", "moe_wna16", "mxfp4", "nvfp4", "quanto", "quark", "spqr",
        "torchao", "vptq", "w4afp8", "w8a8_fp8", "w8a8_int8",
    )
)  # fmt: skip
# A fused module of an engine and the modules of the checkpoint that it is made of.
_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    }
)
_MAX_EDGE = 2**20
_MAX_PATTERN = 256
_MAX_REPEATS = 4  # of a pattern from a file that nobody vouches for, so that matching stays polynomial of low degree


def form_of(members: Collection[str], dtype: DType) -> Form:
    """The form that the stored members of a source group point to, also where one is missing. `dtype` is that of the
    one that holds the values, if it is there."""
    if "weight_packed" in members or "weight_shape" in members:
        return Form.INT4
    if "weight_scale_inv" in members:
        return Form.FP8_BLOCK
    if "weight_scale" in members:
        return Form.FP8_SCALED
    return Form.FP8_BLOCK if "weight" in members and dtype is DType.F8_E4M3 else Form.PLAIN


def member_dtypes(form: Form, member: str) -> frozenset[DType] | None:
    """The types that the member may have; None for a plain weight, which is judged by its like."""
    return _MEMBER_DTYPES.get((form, member))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """`method` as config.json names it.

    `block`: how many rows and columns one scale of a block-FP8 weight covers. `group`: how many inputs one scale of an
    int4 weight covers. None: not of that form. `excluded` are the modules that stay plain, as the file spells them:
    names, ends of names, or `re:` patterns; a fused name stands for its parts.
    """

    method: str
    block: tuple[int, int] | None
    group: int | None
    excluded: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """False where only the method's name is known."""
        return self.method in _READ

    def excludes(self, module: str) -> bool:
        """Whether the config says that `module` (`model.layers.3.self_attn.q_proj`) is not quantised."""
        return any(_covers(pattern, module) for pattern in self.excluded)


def quant_spec(config: HFView) -> QuantSpec | None:
    """The meaning of `quantization_config`, None where there is none. Raises ConfigError for values without one."""
    if not config.get("quantization_config", None):
        return None
    quant = config.sub("quantization_config")
    method = quant.str("quant_method")
    if method == "none":
        return None
    if method not in _READ | _NAMED:
        raise ConfigError(
            "config/value",
            f"{config.where}: quantization_config: quant_method = {method!r} is not known",
            facts=(f"known: {', '.join(sorted(_READ | _NAMED))}",),
        )
    block = _block(quant) if method == "fp8" else None
    group = _int4_group(quant) if method == "compressed-tensors" else None
    return QuantSpec(method=method, block=block, group=group, excluded=_excluded(quant))


def _block(quant: HFView) -> tuple[int, int] | None:
    """None: one scale per tensor."""
    if (fmt := quant.str("fmt", default="e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _bad(quant, f"fmt = {fmt!r}: only e4m3 weights are known")
    edges = quant.list("weight_block_size", default=None)
    if edges is None:
        return None
    if len(edges) != 2 or any(type(edge) is not int or not 1 <= edge <= _MAX_EDGE for edge in edges):
        raise _bad(quant, f"weight_block_size = {list(edges)!r} must be two whole numbers from 1 on")
    return edges[0], edges[1]


def _int4_group(quant: HFView) -> int | None:
    """The group size where every config group is packed symmetric int4 in groups of one size."""
    packed = quant.str("format", default="") == "pack-quantized"
    groups = quant.sub("config_groups")
    if not groups.keys():
        raise _bad(quant, "config_groups is empty")
    sizes = {_group_size(groups.sub(name)) for name in groups.keys()}  # noqa: SIM118  (HFView is not a mapping)
    return sizes.pop() if packed and len(sizes) == 1 else None


def _group_size(group: HFView) -> int | None:
    weights = group.sub("weights")
    bits, size = weights.int("num_bits"), weights.int("group_size", default=None)
    if not 1 <= bits <= 16:
        raise _bad(weights, f"num_bits = {bits} is out of range (1..16)")
    if weights.str("strategy", default="") != "group":
        return None
    if size is None or not 1 <= size <= _MAX_EDGE:
        raise _bad(weights, f"group_size = {size} is no size of a group")
    is_int4 = bits == 4 and weights.str("type", default="int") == "int" and weights.flag("symmetric", default=True)
    return size if is_int4 else None


def _excluded(quant: HFView) -> tuple[str, ...]:
    names: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"):
        for name in quant.list(key, default=()):
            if not isinstance(name, str):
                raise _bad(quant, f"{key} must be a list of module names")
            names.append(_checked(quant, key, name))
    return tuple(names)


def _checked(quant: HFView, key: str, name: str) -> str:
    if not name.startswith("re:"):
        return name
    pattern = name.removeprefix("re:")
    try:
        re.compile(pattern)
    except re.error as error:
        raise _bad(quant, f"{key}: {name!r} is no pattern: {error}") from error
    if (
        len(pattern) > _MAX_PATTERN
        or len(re.findall(r"[*+{]", pattern)) > _MAX_REPEATS
        or re.search(r"\)[*+{]", pattern)
    ):
        raise _bad(quant, f"{key}: the pattern {name[:60]!r} repeats too much to be tried")
    return name


def _covers(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return any(_is_part(name, module) for name in _parts(pattern))


def _parts(name: str) -> tuple[str, ...]:
    head, dot, last = name.rpartition(".")
    return (name, *(f"{head}{dot}{part}" for part in _FUSED.get(last, ())))


def _is_part(name: str, module: str) -> bool:
    """`name` is the module, one that contains it, or the end of its name."""
    return module == name or module.startswith(f"{name}.") or module.endswith(f".{name}")


def _bad(view: HFView, what: str) -> ConfigError:
    return ConfigError("config/value", f"{view.where}: quantization_config: {what}")
