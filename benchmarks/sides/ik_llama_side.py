"""ik_llama.cpp, weights repacked at load (-rtr), through the small loop that its installation compiles.

The directory of libloop.so and version.txt is that of the environment's interpreter.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from protocol import serve


class IkLlama:
    def __init__(self, model: str, threads: int) -> None:
        home = Path(sys.prefix)
        self.version = (home / "version.txt").read_text().strip()
        self._loop = ctypes.CDLL(str(home / "libloop.so"))
        if self._loop.loop_open(model.encode(), threads):
            raise RuntimeError(f"{model} was refused")

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        batch, length = len(prompts), len(prompts[0])
        tokens = (ctypes.c_int * (batch * length))(*chain.from_iterable(prompts))
        return self._loop.loop_generate(tokens, batch, length, new_tokens)


if __name__ == "__main__":
    serve(IkLlama)
