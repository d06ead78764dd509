"""The C interface of csrc/proa.cpp as ctypes structures, and the loading of the library. Owns no meaning: see there."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

from proa.errors import KernelUnavailable


class Kind(IntEnum):
    """enum Kind of csrc/op.h."""

    LOOKUP = 0
    TABLE = 1
    ADD_NORM = 2
    MATMUL = 3
    LOGITS = 4
    FFN = 5
    ROTATION = 6
    WRITE = 7
    ATTENTION = 8
    SELECT = 9
    ROUTE = 10
    EXPERTS = 11
    LATENT_WRITE = 12
    LATENT_ATTENTION = 13
    NORM = 14
    DELTA = 15
    GATE = 16
    SCALE = 17
    INDEX = 18
    SAMPLE = 19


class Form(IntEnum):
    """enum Form of csrc/linear.h."""

    F32 = 0
    BF16 = 1
    Q8_0 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q4_K = 5
    Q6_K = 6
    F8 = 7


class CLinear(Structure):
    """struct Linear of csrc/linear.h."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("form", c_int64),
        ("out", c_int64),
        ("in_", c_int64),
        ("scales", c_void_p),
        ("block", c_int64),
    )


class CLatent(Structure):
    """struct Latent of csrc/latent.h."""

    _fields_ = (
        ("key", c_void_p),
        ("value", c_void_p),
        ("rows", c_void_p),
        ("norm", c_void_p),
        ("page_size", c_int64),
        ("heads", c_int64),
        ("nope", c_int64),
        ("rope", c_int64),
        ("value_size", c_int64),
        ("rank", c_int64),
        ("is_interleaved", c_int64),
        ("eps", c_float),
    )


class CIndex(Structure):
    """struct Index of csrc/sparse.h."""

    _fields_ = (
        ("rows", c_void_p),
        ("norm", c_void_p),
        ("bias", c_void_p),
        ("weights", c_void_p),
        ("next", c_int64),
        ("page_size", c_int64),
        ("heads", c_int64),
        ("size", c_int64),
        ("rope", c_int64),
        ("is_interleaved", c_int64),
        ("top_k", c_int64),
        ("buffers", c_int64),
        ("capacity", c_int64),
        ("eps", c_float),
    )


class CHeads(Structure):
    """struct HeadShape."""

    _fields_ = (
        ("query", c_int64),
        ("key_value", c_int64),
        ("size", c_int64),
        ("rope", c_int64),
        ("is_interleaved", c_int64),
        ("is_whole", c_int64),
        ("eps", c_float),
        ("norm", c_void_p),
    )


class CCache(Structure):
    """struct Cache of csrc/attention.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("page_size", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
    )


class CRouter(Structure):
    """struct Router of csrc/moe.h."""

    _fields_ = (
        ("linear", CLinear),
        ("correction", c_void_p),
        ("score", c_int64),
        ("groups", c_int64),
        ("top_groups", c_int64),
        ("best_of_group", c_int64),
        ("renormalise", c_int64),
        ("top_k", c_int64),
        ("num_shared", c_int64),
        ("first_shared", c_int64),
        ("scale", c_float),
        ("shared_weight", c_float),
        ("shared_gate", c_void_p),
        ("table", c_void_p),
    )


class CExperts(Structure):
    """struct Experts of csrc/moe.h."""

    _fields_ = (
        ("gate_up", CLinear),
        ("down", CLinear),
        ("slots", c_int64),
        ("hidden", c_int64),
        ("width", c_int64),
        ("gate", c_void_p),
        ("limit", c_float),
    )


class COp(Structure):
    """struct Op of csrc/op.h."""

    _fields_ = (
        ("kind", c_int64),
        ("selected", c_int64),
        ("n", c_int64),
        ("m", c_int64),
        ("f", c_double),
        ("a", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("d", c_void_p),
        ("e", c_void_p),
        ("out", c_void_p),
        ("tmp", c_void_p),
        ("scratch", c_void_p),
    )


class CBatch(Structure):
    """struct Batch of csrc/op.h."""

    _fields_ = (
        ("rows", c_int64),
        ("num_logits", c_int64),
        ("num_requests", c_int64),
        ("num_states", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("logits_rows", c_void_p),
        ("requests", c_void_p),
        ("states", c_void_p),
        ("logits", c_void_p),
    )


def load_library(path: Path | None) -> ctypes.CDLL:
    """The compiled kernels. Raises KernelUnavailable `kernels/no-library` without a file: plans never lead here."""
    if path is None:
        raise KernelUnavailable("kernels/no-library", "native kernels were planned, but their library was not built")
    library = ctypes.CDLL(str(path))
    library.proa_pack.argtypes = (c_int64, c_void_p, c_int64, c_int64, c_void_p)
    library.proa_pack.restype = None
    library.proa_pack_slots.argtypes = (c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64)
    library.proa_pack_slots.restype = None
    library.proa_row_bytes.argtypes = (c_int64, c_int64)
    library.proa_row_bytes.restype = c_int64
    library.proa_pack_blocks.argtypes = (c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    library.proa_pack_blocks.restype = None
    library.proa_pack_block_slots.argtypes = (c_int64, c_void_p, *(c_int64,) * 5, c_void_p)
    library.proa_pack_block_slots.restype = None
    library.proa_run.argtypes = (c_int64, POINTER(COp), c_int64, POINTER(CBatch))
    library.proa_run.restype = None
    library.proa_scratch_bytes.argtypes = (c_int64, c_int64)
    library.proa_scratch_bytes.restype = c_int64
    return library
