"""OpenVINO GenAI, which reads a GGUF file of a dense model by itself; computed in bf16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai
from protocol import serve


class OpenVino:
    def __init__(self, model: str, threads: int) -> None:
        self.version = f"openvino-genai {openvino_genai.__version__}"
        self._pipeline = openvino_genai.LLMPipeline(
            model, "CPU", ATTENTION_BACKEND="SDPA", INFERENCE_PRECISION_HINT="bf16", INFERENCE_NUM_THREADS=threads
        )

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        return sum(len(tokens) for tokens in self._pipeline.generate(inputs, config).tokens)


if __name__ == "__main__":
    serve(OpenVino)
