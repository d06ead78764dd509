"""vLLM's CPU build in bf16, compiled (its default), prefix cache off."""

from __future__ import annotations

import os
from collections.abc import Sequence

from protocol import serve


class Vllm:
    def __init__(self, model: str, threads: int) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["OMP_NUM_THREADS"] = str(threads)  # else it takes one away for serving
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        import vllm

        self.version = f"vllm {vllm.__version__}"
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(model, dtype="bfloat16", max_model_len=1024, max_num_seqs=32, enable_prefix_caching=False)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        params = self._params(max_tokens=new_tokens, ignore_eos=True, temperature=0)
        items = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._llm.generate(items, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)


if __name__ == "__main__":
    serve(Vllm)
