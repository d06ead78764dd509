"""What a weight file is by its first bytes and its name; pickles are refused by both. Owns no parsing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proa.errors import CheckpointError

PICKLE_SUFFIXES = frozenset((".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"))
_CONVERT = "convert it with safetensors in a place that you trust, or take a checkpoint in safetensors or GGUF form"


def refuse_pickle_name(path: Path, *, others: Sequence[str] = ()) -> None:
    """Raises CheckpointError when the name says that the file is a pickle. Such a file is never opened."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        facts = [f"so are {', '.join(others)}"] if others else []
        raise CheckpointError(
            "checkpoint/pickle",
            f"{path.name}: pickle files can run code and are never read",
            facts=facts,
            hint=_CONVERT,
        )


def refuse_foreign_magic(path: Path, head: bytes, expected: str) -> None:
    """Raises CheckpointError naming what `head`, the first bytes of a file that is not `expected`, looks like."""
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        raise CheckpointError(
            "checkpoint/pickle", f"{path.name}: is a zip archive (a torch pickle), not {expected}", hint=_CONVERT
        )
    if head[:1] == b"\x80" and head[1:2] in (b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"):
        raise CheckpointError("checkpoint/pickle", f"{path.name}: is a pickle, not {expected}", hint=_CONVERT)
    if head[:4] == b"GGUF":
        raise CheckpointError("checkpoint/wrong-form", f"{path.name}: is a GGUF file, not {expected}")
