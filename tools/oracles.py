"""Write every reference checkpoint that the oracle tests know, and print the matrix of what there is and what is not.

`python tools/oracles.py MAKE_TINY INTO`: MAKE_TINY is the program that writes one (family, directory, --quant fp8,
--plain-draft); INTO becomes PROA_ORACLES. A form that the program does not offer is a gap, printed with its reason;
anything else that fails is an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DENSE = ("llama", "qwen2", "qwen3", "mistral", "mistral_swa")
PLAIN = (
    "mistral3_vl", "qwen2_moe", "qwen3_moe", "minimax_m2", "deepseek_v2_lite", "deepseek_v2", "kimi_k2", "kimi_k25",
    "mistral4", "kimi_linear",
)  # fmt: skip
BUNDLING = (
    "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "qwen3_next", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_text", "qwen3_5_moe_text",
)  # fmt: skip
FORMS = (("plain", ()), ("fp8", ("--quant", "fp8")), ("fp8_plain_draft", ("--quant", "fp8", "--plain-draft")))
WORKERS = 2


def main() -> int:
    program, into = Path(sys.argv[1]), Path(sys.argv[2])
    jobs = [(family, into / family, ()) for family in DENSE]
    jobs.append(("llama", into / "llama_sharded", ("--shards", "3")))
    for form, options in FORMS:
        families = BUNDLING if form == "fp8_plain_draft" else (*PLAIN, *BUNDLING)
        jobs += [(family, into / form / family, options) for family in families]
    with ThreadPoolExecutor(WORKERS) as pool:
        results = list(pool.map(lambda job: write(program, *job), jobs))
    for (_, folder, _), said in zip(jobs, results, strict=True):
        print(f"{folder.relative_to(into)!s:36} {said}")
    return any(said.startswith("failed") for said in results)


def write(program: Path, family: str, folder: Path, options: tuple[str, ...]) -> str:
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(program), family, str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return "written"
    shutil.rmtree(folder, ignore_errors=True)  # half a checkpoint is none
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"gap: {reason}" if "is not available" in reason else f"failed: {reason}"


if __name__ == "__main__":
    sys.exit(main())
