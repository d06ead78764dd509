"""Which public MoE models are kept, where their configs and tensors were read, and what others published of them."""

from __future__ import annotations

from dataclasses import dataclass

HUB = "https://huggingface.co"
CONFIGS = (
    "https://github.com/ai-dynamo/aiconfigurator/blob/095f58a51c4ca8e61b66ec108d86f223f8d559ce/"
    "aic-core/src/aiconfigurator_core/model_configs"
)
ATLAS = "https://github.com/limjiunnbin/model-research-atlas/blob/main"
AUDITS = f"{ATLAS}/data/families/deepseek/research/header-audits"
"""Every header of every shard, read by its author: templates, dtypes, shapes, totals."""
API = "safetensors.total of the hub's API (https://huggingface.co/api/models/ID), as quoted in public repositories"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicMoE:
    """`config` and `names`: where config.json and the tensors of `templates/` were read. `figures`: where the numbers
    below stand; a model without any is "derived", and nothing is asserted of its totals.

    `tensors` and `payload_bytes` are those of all shards, headers not counted. `parameters` are the model's values:
    drafts, copies and towers included, scales and buffers not; `elements` are those of all tensors as they are stored.
    `main_parameters` are the target's own, without a bundled draft. `unconfirmed`: what was taken from the model's
    siblings, or left out because no source could be found.
    """

    name: str
    hub: str
    config: str
    names: str
    figures: str
    tensors: int | None = None
    payload_bytes: int | None = None
    parameters: int | None = None
    elements: int | None = None
    main_parameters: int | None = None
    has_draft: bool = False
    has_gpu_text: bool = False
    unconfirmed: str = ""

    @property
    def is_derived(self) -> bool:
        return not any((self.tensors, self.payload_bytes, self.parameters, self.elements))


_GLM_NAMES = f"{HUB}/docs/transformers/model_doc/glm4_moe, {HUB}/zai-org/GLM-4.5 (358B with the draft)"
_GLM_KEYS = "config keys from the NVFP4 release of GLM-4.7 and from GLM-4.5-Air's config with the sizes of GLM-4.5"
_GLM_BIAS = "e_score_correction_bias as F32 is that of GLM-4.7-Flash"

MODELS = (
    PublicMoE(
        name="deepseek-v3",
        hub="deepseek-ai/DeepSeek-V3",
        config=f"{CONFIGS}/deepseek-ai--DeepSeek-V3_config.json",
        names=f"{AUDITS}/DeepSeek-V3.json; {HUB}/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md",
        figures=f"{AUDITS}/summary.json; elements: {API}; main_parameters: the same of microsoft/MAI-DS-R1",
        tensors=91_991,
        payload_bytes=688_574_839_360,
        elements=684_531_386_000,
        main_parameters=671_026_419_200,
        has_draft=True,
        has_gpu_text=True,
    ),
    PublicMoE(
        name="deepseek-v3.2",
        hub="deepseek-ai/DeepSeek-V3.2",
        config=f"{CONFIGS}/deepseek-ai--DeepSeek-V3.2_config.json",
        names=f"{AUDITS}/DeepSeek-V3.2.json",
        figures=f"{AUDITS}/summary.json; parameters: {API}",
        tensors=92_425,
        payload_bytes=689_471_107_200,
        parameters=685_355_329_792,
        has_draft=True,
    ),
    PublicMoE(
        name="glm-4.5",
        hub="zai-org/GLM-4.5",
        config="https://docs.nvidia.com/nemo/megatron-bridge/latest/models/llm/glm45.html (sizes, rope base, context)",
        names=_GLM_NAMES,
        figures=API,
        parameters=358_337_791_296,
        has_draft=True,
        unconfirmed=f"{_GLM_KEYS}; transformers_version left out; {_GLM_BIAS}",
    ),
    PublicMoE(
        name="glm-4.6",
        hub="zai-org/GLM-4.6",
        config=f"{HUB}/zai-org/GLM-4.6/blob/main/config.json, as quoted in public repositories",
        names=f"{_GLM_NAMES}; no copies of embedding and head: the published total leaves no room for them",
        figures=API,
        parameters=356_785_898_816,
        has_draft=True,
        unconfirmed=f"{_GLM_KEYS}; transformers_version left out; {_GLM_BIAS}",
    ),
    PublicMoE(
        name="glm-4.7",
        hub="zai-org/GLM-4.7",
        config=f"{HUB}/zai-org/GLM-4.7/blob/main/config.json, as quoted in public repositories",
        names=_GLM_NAMES,
        figures=API,
        parameters=358_337_791_296,
        has_draft=True,
        unconfirmed=f"transformers_version and dtype are those of its NVFP4 release; {_GLM_BIAS}",
    ),
    PublicMoE(
        name="glm-4.7-flash",
        hub="zai-org/GLM-4.7-Flash",
        config="https://github.com/vllm-project/vllm (the release's keys in the tests of its glm4_moe_lite config)",
        names=f"{HUB}/zai-org/GLM-4.7-Flash (9,703 names, layer 47 among them), as quoted in public repositories",
        figures=f"{API}; payload: the hub's element counts by dtype (the index's own total_size counts elements)",
        tensors=9_703,
        payload_bytes=62_442_983_168,
        parameters=31_221_488_576,
        has_draft=True,
        has_gpu_text=True,
        unconfirmed="head_dim, rope_interleave, transformers_version and use_cache left out",
    ),
    PublicMoE(
        name="kimi-k2-instruct",
        hub="moonshotai/Kimi-K2-Instruct",
        config=f"{CONFIGS}/moonshotai--Kimi-K2-Instruct_config.json",
        names=f"{ATLAS}/data/families/kimi/k2-instruct-layers.json (counts and bytes by layer and dtype)",
        figures=f"{ATLAS}/data/families/kimi/k2-instruct-layers.json",
        tensors=139_644,
        payload_bytes=1_029_173_256_720,
        parameters=1_026_408_232_448,
        unconfirmed="the name of the 61 rope buffers: their number, dtype and 112 bytes each follow from the figures",
    ),
    PublicMoE(
        name="kimi-k2.5",
        hub="moonshotai/Kimi-K2.5",
        config=f"{CONFIGS}/moonshotai--Kimi-K2.5_config.json",
        names=f"{ATLAS}/dist/data/families/kimi/k2.5-layers.json; {HUB}/moonshotai/Kimi-K2.5 (modeling_kimi_k25.py)",
        figures=f"{ATLAS}/dist/data/families/kimi/k2.5-layers.json",
        tensors=208_550,
        payload_bytes=595_148_192_736,
        parameters=1_026_879_376_368,
        unconfirmed="names inside the vision tower: shapes and count follow from the config and from the figures",
    ),
    PublicMoE(
        name="qwen3-235b-a22b",
        hub="Qwen/Qwen3-235B-A22B",
        config=f"{CONFIGS}/Qwen--Qwen3-235B-A22B_config.json",
        names=f"{HUB}/docs/transformers/model_doc/qwen3_moe",
        figures=f"{API}; metadata.total_size and number of names of its index, as quoted in public repositories",
        tensors=36_945,
        payload_bytes=470_187_269_120,
        parameters=235_093_634_560,
    ),
    PublicMoE(
        name="minimax-m2",
        hub="MiniMaxAI/MiniMax-M2",
        config=f"{CONFIGS}/MiniMaxAI--MiniMax-M2.5_config.json (equal in all keys that are quoted of MiniMax-M2)",
        names=f"{HUB}/docs/transformers/model_doc/minimax_m2",
        figures=f"payload: https://github.com/alvarobartt/hf-mem (README); parameters: {API}",
        payload_bytes=230_121_630_720,
        parameters=228_689_764_864,
        unconfirmed="attn_type_list left out; the router as F32 follows from the payload",
    ),
)
