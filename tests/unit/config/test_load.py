"""Merging of sources: precedence, specificity, origins, and errors that name the place."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.choice import OriginSource
from proa.config.intent import EngineConfig
from proa.config.load import load_config, refuse_unknown_variables
from proa.errors import ConfigError
from proa.units import Algorithm, DType, Numerics, SharedExperts, Verification


def load(
    *,
    toml: str | None = None,
    tmp: Path | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
    api: dict[str, Any] | None = None,
) -> EngineConfig:
    file = None
    if toml is not None:
        assert tmp is not None
        file = tmp / "run.toml"
        file.write_text(toml, encoding="utf-8")
    return load_config("m", flags=flags or {}, file=file, environ=environ or {}, api=api or {})


def refused(**sources: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(**sources)
    return caught.value


def test_without_any_source_every_leaf_is_auto_by_default_except_the_model() -> None:
    leaves = dict(load().leaves())
    assert leaves.pop("target.path").value == "m"
    assert {leaf.origin.source for leaf in leaves.values()} == {OriginSource.DEFAULT}
    assert all(leaf.is_auto for leaf in leaves.values())


def test_the_intent_is_frozen() -> None:
    config = load()
    with pytest.raises(FrozenInstanceError):
        config.target.dtype = config.draft.dtype  # type: ignore[misc]  # the write is what must fail


def test_every_kind_of_value_is_read_from_text() -> None:
    config = load(
        flags={
            "--draft": "small",
            "--speculative": "standalone",
            "--num-draft-tokens": "0",
            "--verification": "rejection",
            "--dtype": "bfloat16",
            "--kv-dtype": "float32",
            "--shared-experts": "fused",
            "--numerics": "exact",
            "--device": "meta",
            "--quantization": "none",
            "--kv-memory": "2GiB",
            "--threads": "7",
            "--tensor-parallel": "2",
            "--allow-unexpected": ["a.*", "b,c"],
        }
    )
    assert config.draft.path.value == "small"
    assert config.speculative.algorithm.value is Algorithm.STANDALONE
    assert config.speculative.num_draft_tokens.value == 0
    assert config.speculative.verification.value is Verification.REJECTION
    assert config.target.dtype.value is config.draft.dtype.value is DType.BF16
    assert config.target.kv_dtype.value is DType.F32
    assert config.draft.shared_experts.value is SharedExperts.FUSED
    assert config.target.numerics.value is Numerics.EXACT
    assert config.draft.device.value == "meta"
    assert config.target.quantization.value == "none"
    assert config.cache.memory_bytes.value == 2 * 1024**3
    assert config.host.threads.value == 7
    assert config.parallel.tensor_parallel.value == 2
    assert config.load.allow_unexpected.value == ("a.*", "b,c")


def test_each_source_gives_the_same_leaf_and_its_own_origin(tmp_path: Path) -> None:
    sources: dict[OriginSource, tuple[dict[str, Any], str]] = {
        OriginSource.FILE: (
            {"toml": 'draft.kv_dtype = "bfloat16"', "tmp": tmp_path},
            f"{tmp_path / 'run.toml'}: draft.kv_dtype",
        ),
        OriginSource.ENV: ({"environ": {"PROA_DRAFT__KV_DTYPE": "bfloat16"}}, "PROA_DRAFT__KV_DTYPE"),
        OriginSource.FLAG: ({"flags": {"--draft.kv-dtype": "bfloat16"}}, "--draft.kv-dtype"),
        OriginSource.API: ({"api": {"draft_kv_dtype": "bfloat16"}}, "draft_kv_dtype"),
    }
    for source, (given_source, where) in sources.items():
        choice = load(**given_source).draft.kv_dtype
        assert choice.value is DType.BF16
        assert choice.origin.source is source
        assert choice.origin.where == where
        assert load(**given_source).target.kv_dtype.is_auto


def test_a_later_source_replaces_an_earlier_one(tmp_path: Path) -> None:
    sources: tuple[tuple[int, dict[str, Any]], ...] = (
        (1, {"toml": "threads = 1", "tmp": tmp_path}),
        (2, {"environ": {"PROA_THREADS": "2"}}),
        (3, {"flags": {"--threads": "3"}}),
        (4, {"api": {"threads": 4}}),
    )
    for chosen in itertools.product((False, True), repeat=4):
        used = [source for source, use in zip(sources, chosen, strict=True) if use]
        merged: dict[str, Any] = {}
        for _, source in used:
            merged |= source
        assert load(**merged).host.threads.value == (used[-1][0] if used else None)


def test_a_base_flag_sets_the_three_phases_of_both_runners() -> None:
    config = load(flags={"--attention": "native"})
    for runner in (config.target, config.draft):
        assert [runner.attention_prefill.value, runner.attention_decode.value, runner.attention_verify.value] == [
            "native"
        ] * 3
        assert runner.linear_attention_decode.is_auto


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_within_one_source_the_runner_counts_more_than_the_phase_in_any_order(order: tuple[int, ...]) -> None:
    asked = [
        ("--attention", "base"),
        ("--attention.decode", "phase"),
        ("--draft.attention", "role"),
        ("--draft.attention.verify", "both"),
    ]
    config = load(flags=dict(asked[i] for i in order))
    assert config.target.attention_prefill.value == "base"
    assert config.target.attention_decode.value == "phase"
    assert config.draft.attention_prefill.value == "role"
    assert config.draft.attention_decode.value == "role"
    assert config.draft.attention_verify.value == "both"


@pytest.mark.parametrize("base", ["--attention", "--draft.attention", "--attention.decode"])
def test_a_later_sources_base_replaces_an_earlier_sources_specific_key(base: str, tmp_path: Path) -> None:
    config = load(toml='draft.attention.decode = "native"', tmp=tmp_path, flags={base: "reference"})
    assert config.draft.attention_decode.value == "reference"
    assert config.draft.attention_decode.origin.where == base


def test_a_later_sources_specific_key_replaces_only_its_leaf() -> None:
    config = load(environ={"PROA_ATTENTION": "native"}, flags={"--target.attention.decode": "reference"})
    assert config.target.attention_decode.value == "reference"
    assert config.target.attention_prefill.value == config.draft.attention_decode.value == "native"


LEAF_FLAGS = ["--dtype", "--target.dtype", "--draft.dtype"]


@settings(deadline=None)
@given(
    low=st.dictionaries(st.sampled_from(LEAF_FLAGS), st.sampled_from(["auto", "float32", "bfloat16"])),
    high=st.dictionaries(st.sampled_from(LEAF_FLAGS), st.sampled_from(["auto", "float32", "bfloat16"])),
)
def test_a_shorthand_means_exactly_its_spelled_out_form(low: dict[str, str], high: dict[str, str]) -> None:
    def spelled_out(asked: dict[str, str]) -> dict[str, str]:
        both = {f"--{role}.dtype": asked["--dtype"] for role in ("target", "draft") if "--dtype" in asked}
        return both | {flag: value for flag, value in asked.items() if flag != "--dtype"}

    def values(low_flags: dict[str, str], high_flags: dict[str, str]) -> list[Any]:
        environ = {"PROA_" + flag[2:].replace(".", "__").upper(): value for flag, value in low_flags.items()}
        config = load(environ=environ, flags=high_flags)
        return [(runner.dtype.value, runner.dtype.origin.source) for runner in (config.target, config.draft)]

    assert values(low, high) == values(spelled_out(low), spelled_out(high))


def test_auto_is_accepted_everywhere_replaces_earlier_values_and_keeps_its_origin() -> None:
    config = load(
        environ={"PROA_DTYPE": "float32", "PROA_NUM_DRAFT_TOKENS": "3", "PROA_ALLOW_UNEXPECTED": "a*"},
        flags={"--dtype": "auto", "--num-draft-tokens": "auto", "--allow-unexpected": ["auto"], "--draft": "auto"},
    )
    for choice in (
        config.target.dtype,
        config.draft.dtype,
        config.speculative.num_draft_tokens,
        config.load.allow_unexpected,
        config.draft.path,
    ):
        assert choice.is_auto
        assert choice.origin.source is OriginSource.FLAG


def test_a_flag_typed_twice_counts_once_the_last_and_a_repeatable_one_collects() -> None:
    config = load(flags={"--threads": ["1", "2"], "--allow-unexpected": ["a", "b"]})
    assert config.host.threads.value == 2
    assert config.load.allow_unexpected.value == ("a", "b")


def test_lists_of_a_later_source_replace_and_commas_separate_in_the_environment() -> None:
    assert load(environ={"PROA_ALLOW_UNEXPECTED": "a*,b.*"}).load.allow_unexpected.value == ("a*", "b.*")
    both = load(environ={"PROA_ALLOW_UNEXPECTED": "a*"}, api={"allow_unexpected": ("c",)})
    assert both.load.allow_unexpected.value == ("c",)


@pytest.mark.parametrize(
    "toml",
    [
        'draft = "small"\nlinear_attention.base = "native"\nlinear_attention.decode = "reference"',
        '[draft]\npath = "small"\n[linear_attention]\nbase = "native"\ndecode = "reference"',
    ],
)
def test_toml_keys_may_be_dotted_or_in_tables(toml: str, tmp_path: Path) -> None:
    config = load(toml=toml, tmp=tmp_path)
    assert config.draft.path.value == "small"
    assert config.target.linear_attention_prefill.value == "native"
    assert config.draft.linear_attention_decode.value == "reference"


def test_toml_numbers_and_lists_keep_their_types(tmp_path: Path) -> None:
    config = load(
        toml='kv_memory = 4096\nallow_unexpected = ["a", "b"]\n[target]\npage_size = 8\nattention = "native"',
        tmp=tmp_path,
    )
    assert config.cache.memory_bytes.value == 4096
    assert config.load.allow_unexpected.value == ("a", "b")
    assert config.target.page_size.value == 8
    assert config.draft.page_size.is_auto
    assert config.target.attention_verify.value == "native"


@pytest.mark.parametrize(
    "api",
    [
        {"draft": {"path": Path("small"), "kv_dtype": "bfloat16", "attention": {"decode": "native"}}},
        {"draft_path": "small", "draft_kv_dtype": DType.BF16, "draft_attention_decode": "native"},
        {"draft": {"path": "small", "attention_decode": "native"}, "draft_kv_dtype": "bfloat16"},
    ],
)
def test_python_names_may_be_nested_flat_or_mixed(api: dict[str, Any]) -> None:
    config = load(api=api)
    assert config.draft.path.value == "small"
    assert config.draft.kv_dtype.value is DType.BF16
    assert config.draft.attention_decode.value == "native"
    assert config.target.attention_decode.is_auto


def test_python_may_name_the_draft_by_its_path_alone_and_none_means_not_asked() -> None:
    config = load(environ={"PROA_DTYPE": "float32"}, api={"draft": "small", "dtype": None})
    assert config.draft.path.value == "small"
    assert config.target.dtype.origin.source is OriginSource.ENV


def test_an_empty_variable_counts_as_not_set_and_foreign_variables_are_not_read() -> None:
    config = load(environ={"PROA_DTYPE": "", "HOME": "/x", "PROA_CACHE_DIR": "/c"})
    assert config == load()


def test_the_file_that_proa_config_names_is_read_unless_one_is_given(tmp_path: Path) -> None:
    named = tmp_path / "named.toml"
    named.write_text("threads = 5")
    assert load(environ={"PROA_CONFIG": str(named)}).host.threads.value == 5
    assert load(environ={"PROA_CONFIG": str(named)}, toml="page_size = 4", tmp=tmp_path).host.threads.is_auto


UNKNOWN = [
    ("config/unknown-key", {"toml": "[draft]\nkv_dtyp = 1"}, "draft.kv_dtyp", "draft.kv_dtype"),
    ("config/unknown-key", {"toml": "max-num-seqs = 1"}, "max-num-seqs", "max_num_seqs"),
    ("config/unknown-key", {"toml": "draft.threads = 1"}, "draft.threads", "threads is a setting of the whole engine"),
    ("config/unknown-key", {"toml": "dtype.x = 1"}, "dtype.x", "dtype"),
    ("config/unknown-key", {"toml": 'target.path = "x"'}, "target.path", "MODEL"),
    ("config/unknown-variable", {"environ": {"PROA_DRAFT_DTYPE": "x"}}, "PROA_DRAFT_DTYPE", "PROA_DRAFT__DTYPE"),
    ("config/unknown-variable", {"environ": {"PROA_CACHE_DIRS": "x"}}, "PROA_CACHE_DIRS", "PROA_CACHE_DIR"),
    ("config/unknown-variable", {"environ": {"PROA_MODEL": "x"}}, "PROA_MODEL", "MODEL"),
    ("config/unknown-flag", {"flags": {"--atention": "x"}}, "--atention", "--attention"),
    ("config/unknown-argument", {"api": {"draft": {"dtyp": "x"}}}, "draft.dtyp", "draft_dtype"),
    ("config/unknown-argument", {"api": {"linear_atention_decode": "x"}}, "linear_atention_decode", "linear_attention"),
]


@pytest.mark.parametrize(("slug", "sources", "named", "meant"), UNKNOWN)
def test_an_unknown_name_is_refused_with_what_was_meant(
    slug: str, sources: dict[str, Any], named: str, meant: str, tmp_path: Path
) -> None:
    error = refused(tmp=tmp_path, **sources)
    assert error.slug == slug
    assert named in error.message
    assert meant in (error.hint or "")
    if "toml" in sources:
        assert "run.toml" in error.message


def test_even_an_argument_that_is_none_must_exist() -> None:
    assert refused(api={"drafft": None}).slug == "config/unknown-argument"


BAD = [
    ({"flags": {"--dtype": "float16"}}, "--dtype", "float32, bfloat16"),
    ({"flags": {"--draft.shared-experts": "fuse"}}, "--draft.shared-experts", "fused, separate"),
    ({"flags": {"--num-draft-tokens": "-1"}}, "--num-draft-tokens", "from 0 to"),
    ({"flags": {"--threads": "0"}}, "--threads", "from 1 to"),
    ({"flags": {"--threads": "1.5"}}, "--threads", "whole number"),
    ({"flags": {"--threads": "9" * 5000}}, "--threads", "whole number"),
    ({"flags": {"--threads": "١"}}, "--threads", "whole number"),
    ({"environ": {"PROA_KV_MEMORY": "2 gallons"}}, "PROA_KV_MEMORY", "8GiB"),
    ({"environ": {"PROA_KV_MEMORY": "9" * 400}}, "PROA_KV_MEMORY", "8GiB"),
    ({"environ": {"PROA_MOE_KERNEL": "a b"}}, "PROA_MOE_KERNEL", "name"),
    ({"environ": {"PROA_ALLOW_UNEXPECTED": "a,,b"}}, "PROA_ALLOW_UNEXPECTED", "patterns"),
    ({"toml": "threads = true"}, "threads", "whole number"),
    ({"toml": "threads = 2.0"}, "threads", "whole number"),
    ({"toml": "kv_memory = false"}, "kv_memory", "8GiB"),
    ({"toml": 'dtype = ["float32"]'}, "dtype", "choices"),
    ({"toml": "device = 3"}, "device", "cpu, cuda, meta"),
    ({"toml": "allow_unexpected = [1]"}, "allow_unexpected", "patterns"),
    ({"toml": "allow_unexpected = []"}, "allow_unexpected", "patterns"),
    ({"toml": 'draft = ""'}, "draft", "path"),
    ({"api": {"draft": 3}}, "draft", "path"),
    ({"api": {"dtype": DType.Q4_0}}, "dtype", "float32, bfloat16"),
    ({"api": {"attention_decode": ["native"]}}, "attention_decode", "name"),
]


@pytest.mark.parametrize(("sources", "named", "says"), BAD)
def test_a_bad_value_is_refused_by_its_own_spelling_and_with_what_it_can_be(
    sources: dict[str, Any], named: str, says: str, tmp_path: Path
) -> None:
    error = refused(tmp=tmp_path, **sources)
    assert error.slug == "config/bad-value"
    assert named in error.message
    assert says in str(error)


def test_a_bad_value_for_one_runner_names_the_runner() -> None:
    text = str(refused(flags={"--draft.dtype": "bf16"}))
    assert text.startswith("ConfigError [config/bad-value]: draft: --draft.dtype = 'bf16'")
    assert "did you mean bfloat16?" in text


@pytest.mark.parametrize(
    "sources",
    [
        {"toml": '"draft.path" = "x"\n[draft]\npath = "y"'},
        {"environ": {"PROA_DRAFT": "a", "PROA_DRAFT__PATH": "b"}},
        {"api": {"draft": {"path": "a"}, "draft_path": "b"}},
        {"flags": {"--attention": "a", "--attention.base": "b"}},
    ],
)
def test_two_spellings_of_one_setting_in_one_source_are_refused(sources: dict[str, Any], tmp_path: Path) -> None:
    error = refused(tmp=tmp_path, **sources)
    assert error.slug == "config/duplicate-key"


@pytest.mark.parametrize(
    ("toml", "says"), [("threads = 1\nthreads = 2", "overwrite"), ("threads = x", "line 1"), ("a = 'ä", "not TOML")]
)
def test_a_file_that_is_not_toml_is_refused_by_name(toml: str, says: str, tmp_path: Path) -> None:
    error = refused(toml=toml, tmp=tmp_path)
    assert error.slug == "config/file"
    assert "run.toml" in error.message
    assert says in error.message


def test_a_missing_directory_or_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for file in (tmp_path / "missing.toml", tmp_path, binary):
        with pytest.raises(ConfigError, match=r"config/file") as caught:
            load_config("m", flags={}, file=file, environ={}, api={})
        assert str(file) in caught.value.message


def test_unknown_variables_are_refused_for_verbs_without_settings_too() -> None:
    refuse_unknown_variables({"PROA_DTYPE": "float32", "PROA_DEBUG": "1", "OTHER": "x"})
    with pytest.raises(ConfigError, match="PROA_DEBUGG"):
        refuse_unknown_variables({"PROA_DEBUGG": "1"})


def test_equal_sources_give_equal_intents_and_a_change_shows() -> None:
    first, second = load(flags={"--dtype": "float32"}), load(flags={"--dtype": "float32"})
    assert first == second
    assert hash(first) == hash(second)
    assert replace(first, model="other") != second
