"""What a token's piece means in bytes, and bytes as text while they arrive. Owns no vocabulary and no special ids.

A piece is a token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`). Every tokenizer that Proa reads has pieces
that stand for bytes independently of their neighbours; hence text can be produced token by token without decoding the
whole output again, and half a character is never shown.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from proa.errors import CheckpointError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Utf8Decoder = getincrementaldecoder("utf-8")


def byte_alphabet() -> tuple[str, ...]:
    """Byte -> the printable character that spells it in byte-level vocabularies.

    Printable Latin-1 characters spell themselves; the other bytes, in order, take the characters from U+0100 on.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in shown else next(spare)) for byte in range(256))


_BYTE_OF: Mapping[str, int] = MappingProxyType({character: byte for byte, character in enumerate(byte_alphabet())})


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceDecoder:
    """The meaning of pieces. `strip_first`: text from the very start loses one leading space, which encoding added."""

    byte_level: bool
    byte_fallback: bool
    replacements: tuple[tuple[str, str], ...]
    strip_first: bool

    def to_bytes(self, piece: str) -> bytes:
        if self.byte_level:
            spelled = [_BYTE_OF.get(character, -1) for character in piece]
            # A piece with any other character is an added token, spelled as the text that it is.
            return piece.encode() if -1 in spelled else bytes(spelled)
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        byte = _BYTE_PIECE.fullmatch(piece) if self.byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else piece.encode()


def piece_decoder(description: Mapping[str, Any] | None, where: str) -> PieceDecoder:
    """Read the `decoder` entry of a tokenizer.json. Any that is not bytes per piece is refused by name."""
    steps = _flatten(description)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceDecoder(byte_level=True, byte_fallback=False, replacements=(), strip_first=False)
    replacements: list[tuple[str, str]] = []
    for index, step in enumerate(steps):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if "Fuse" in kinds[:index]:
                pass
            case {"type": "ByteFallback"} | {"type": "Fuse"}:
                pass
            case _:
                raise _unknown(step["type"], where)
    if not steps:
        raise _unknown("none", where)
    return PieceDecoder(
        byte_level=False,
        byte_fallback="ByteFallback" in kinds,
        replacements=tuple(replacements),
        strip_first="Strip" in kinds,
    )


def _flatten(description: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if description is None:
        return []
    if description["type"] == "Sequence":
        return [step for part in description["decoders"] for step in _flatten(part)]
    return [description]


def _unknown(kind: str, where: str) -> CheckpointError:
    return CheckpointError(
        "tokenizer/decoder-unknown",
        f"{where}: the tokenizer's decoder {kind!r} does not give bytes per token.",
        facts=["known: ByteLevel; Sequence of Replace, ByteFallback, Fuse, Strip"],
    )


class Utf8Stream:
    """Text from bytes that arrive in pieces. An unfinished character is held; an impossible one becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = _Utf8Decoder("replace")

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left when the text ends here: nothing, or U+FFFD for half a character."""
        return self._decoder.decode(b"", final=True)
