"""Words that intent, spec and plan share (enums), and how bytes, counts and durations are parsed and printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class Role(Enum):
    TARGET = "target"
    DRAFT = "draft"


class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


class Algorithm(Enum):
    """How proposals are made. Names as users type them."""

    NONE = "none"
    NGRAM = "ngram"
    STANDALONE = "standalone"
    NEXTN = "nextn"
    EAGLE3 = "eagle3"
    DFLASH = "dflash"
    DSPARK = "dspark"


class SharedExperts(Enum):
    FUSED = "fused"
    SEPARATE = "separate"


class Numerics(Enum):
    """EXACT: a row's result depends on nothing else in the batch, the chunk or the verified rows.

    FAST: it may, in its last bits.
    """

    EXACT = "exact"
    FAST = "fast"


class Rollback(Enum):
    """How the recurrent state of a rejected proposal is undone.

    REPLAY: the accepted rows are applied again to the state before the proposal. STATES: one state is kept per row.
    """

    REPLAY = "replay"
    STATES = "states"


class Switch(Enum):
    ON = "on"
    OFF = "off"


class Verification(Enum):
    COUPLED = "coupled"
    REJECTION = "rejection"


class Storage(NamedTuple):
    """How many elements one stored block holds, and its bytes. Plain dtypes are blocks of one element."""

    elements: int
    nbytes: int


class DType(Enum):
    """Stored and compute element types, without torch. GGUF block formats are element types of a stored tensor too."""

    __hash__ = (
        object.__hash__
    )  # members are single; Enum's own, by name, is Python code that big checkpoints call often

    F64 = "float64"
    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"
    F8_E4M3 = "float8_e4m3"
    F8_E5M2 = "float8_e5m2"
    F8_E8M0 = "float8_e8m0"
    I64 = "int64"
    I32 = "int32"
    I16 = "int16"
    I8 = "int8"
    U64 = "uint64"
    U32 = "uint32"
    U16 = "uint16"
    U8 = "uint8"
    BOOL = "bool"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"

    @property
    def storage(self) -> Storage:
        return _STORAGE[self]

    @property
    def is_block(self) -> bool:
        """A GGUF block format: values exist only after dequantisation."""
        return self.storage.elements > 1

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` stored elements; `elements` must be a multiple of the block."""
        per = self.storage
        return elements // per.elements * per.nbytes


_STORAGE: Mapping[DType, Storage] = MappingProxyType(
    {
        **{t: Storage(1, 8) for t in (DType.F64, DType.I64, DType.U64)},
        **{t: Storage(1, 4) for t in (DType.F32, DType.I32, DType.U32)},
        **{t: Storage(1, 2) for t in (DType.F16, DType.BF16, DType.I16, DType.U16)},
        **{t: Storage(1, 1) for t in (DType.F8_E4M3, DType.F8_E5M2, DType.F8_E8M0, DType.I8, DType.U8, DType.BOOL)},
        DType.Q4_0: Storage(32, 18),
        DType.Q4_1: Storage(32, 20),
        DType.Q5_0: Storage(32, 22),
        DType.Q5_1: Storage(32, 24),
        DType.Q8_0: Storage(32, 34),
        DType.Q4_K: Storage(256, 144),
        DType.Q5_K: Storage(256, 176),
        DType.Q6_K: Storage(256, 210),
    }
)

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_POWERS: Mapping[str, int] = MappingProxyType(
    {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
)


def parse_bytes(text: str) -> int:
    """`"8GiB"`, `"500 MB"`, `"4096"` -> bytes. Raises ValueError with the text."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size in bytes: {text!r} (like 8GiB, 500MB, 4096)")
    return int(float(match[1]) * _POWERS[(match[2] or "").lower()])


def format_bytes(count: int) -> str:
    """Bytes in binary units, three significant digits: 271 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def format_seconds(seconds: float) -> str:
    """850 µs, 12.3 ms, 4.56 s."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
