"""transformers in bf16 with SDPA attention: the reference that most users know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from protocol import serve


class Transformers:
    def __init__(self, model: str, threads: int) -> None:
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        torch.set_num_threads(threads)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        ids = torch.tensor(prompts)
        answer = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return answer.numel() - ids.numel()


if __name__ == "__main__":
    serve(Transformers)
