"""llama.cpp by the low-level batch interface of llama-cpp-python: one decode call per step for the whole batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np
from protocol import serve


@llama_cpp.llama_log_callback
def _silent(*_: object) -> None:
    pass


class LlamaCpp:
    def __init__(self, model: str, threads: int) -> None:
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), options)
        if not self._model:
            raise RuntimeError(f"{model} was refused")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = threads
        self._contexts: dict[int, object] = {}

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        context = self._context(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        length = len(prompts[0])
        last = length - 1
        rows = [(token, at, seq, at == last) for seq, text in enumerate(prompts) for at, token in enumerate(text)]
        tokens = self._decode(context, rows, [length * (seq + 1) - 1 for seq in range(len(prompts))])
        for step in range(new_tokens - 1):
            rows = [(token, length + step, seq, True) for seq, token in enumerate(tokens)]
            tokens = self._decode(context, rows, range(len(prompts)))
        return len(prompts) * new_tokens

    def _context(self, sequences: int) -> object:
        """One context per batch size, made at the first use, as a server that is set up for that size has it."""
        if sequences not in self._contexts:
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = sequences * (256 if sequences > 1 else 1024)
            options.n_batch, options.n_ubatch, options.n_seq_max = 2048, 512, sequences
            options.n_threads = options.n_threads_batch = self._threads
            if hasattr(options, "kv_unified"):
                options.kv_unified = False
            context = llama_cpp.llama_init_from_model(self._model, options)
            if not context:
                raise RuntimeError(f"no context for {sequences} sequences")
            self._contexts[sequences] = context
        return self._contexts[sequences]

    def _decode(self, context: object, rows: Sequence[tuple[int, int, int, bool]], wanted: Sequence[int]) -> list[int]:
        """Compute rows of (token, position, sequence, logits wanted); the best token at each wanted row."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, logits) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, logits
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        status = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_synchronize(context)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._best(context, index) for index in wanted]

    def _best(self, context: object, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp)
