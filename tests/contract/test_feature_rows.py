"""The rows of the feature table that this version must prove, and the tests that prove them; the wrappers likewise.

A row is one promise about target and draft as two runners. A test that moves or is renamed takes its line here along.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

TESTS = Path(__file__).parents[1]
DECISION = "features/test_shared_experts_decision.py"
LAYOUTS = "features/test_layouts_agree.py"
RUNNERS = "features/test_two_runners.py"
APART = "features/test_apart.py"
TENSORS = "features/test_every_tensor.py"
ACCEPTANCE = "features/test_acceptance.py"
SHARED = "plan/test_shared_experts.py"
BUNDLED = "plan/test_bundled_drafts.py"
FAMILIES = "plan/test_families.py"
WRAPPED = "families/test_wrapped_bodies.py"
WRAPPERS = "unit/arch/test_wrappers.py"
HYBRID = "unit/arch/test_hybrid_config.py"
LINEAR = "plan/test_linear_attention.py"
PAIRS = "plan/test_hybrid_pairs.py"
BUILT = "features/test_linear_attention.py"

# The others come with what they speak of: DSpark (19, 20), weight updates (35, 36).
REQUIRED = (*range(1, 19), *range(21, 35), *range(37, 41))

ROWS: Mapping[int, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        1: (
            "decided once, before any layer exists",
            (
                f"{DECISION}::test_f1_headers_alone_give_the_decision_and_the_digest_that_a_built_engine_has",
                f"{SHARED}::test_f1_headers_without_weights_give_the_decision_and_the_same_digest_twice",
            ),
        ),
        2: (
            "from the config and the stored tensors that it is handed",
            (
                f"{DECISION}::test_f2_the_answer_follows_an_edited_config",
                f"{DECISION}::test_f2_the_answer_follows_the_stored_form_of_the_tensors",
                f"{SHARED}::test_f2_the_answer_follows_the_config",
            ),
        ),
        3: (
            "the first blocking condition wins, all others are listed",
            (
                f"{DECISION}::test_f3_each_condition_of_the_published_table_can_be_the_reason_and_all_are_shown",
                f"{DECISION}::test_f3_in_every_family_the_first_blocking_condition_wins_and_the_others_are_listed",
                f"{SHARED}::test_f3_every_condition_holds_and_blocks_and_says_why",
                f"{SHARED}::test_f3_the_first_blocking_condition_is_the_reason_and_all_others_are_listed",
            ),
        ),
        4: (
            "what was asked is taken, or is an error",
            (
                f"{DECISION}::test_f4_the_four_asks",
                f"{SHARED}::test_f4_separate_is_always_possible_and_reads_no_fact",
                f"{SHARED}::test_f4_fused_against_a_preference_is_taken_and_the_preference_kept_as_a_note",
                f"{SHARED}::test_f4_f5_fused_against_what_blocks_always_is_an_error_that_names_it",
            ),
        ),
        5: (
            "a different stored form vetoes even a forced fusion",
            (
                f"{DECISION}::test_f5_experts_in_eight_bits_beside_plain_shared_ones_are_never_fused",
                f"{SHARED}::test_f5_a_width_of_no_whole_slots_blocks_always",
            ),
        ),
        6: (
            "fused and separate are one function",
            (
                f"{LAYOUTS}::test_f6_fused_and_separate_give_the_same_logits",
                f"{LAYOUTS}::test_f6_the_text_of_both_is_the_same",
                "families/test_fused_experts.py::test_fused_and_separate_are_one_function",
            ),
        ),
        7: (
            "the weight of a shared slot",
            (
                f"{LAYOUTS}::test_f7_any_scale_and_number_of_shared_experts",
                f"{LAYOUTS}::test_f7_the_scale_may_be_applied_to_the_sum",
                f"{LAYOUTS}::test_f7_a_broken_rule_of_the_weight_is_refused_when_it_is_loaded",
                f"{LAYOUTS}::test_f7_a_broken_rule_of_the_weight_is_no_rounding",
                f"{LAYOUTS}::test_f7_the_scale_in_the_config_matters_in_both_layouts",
                f"{SHARED}::test_f7_fused_experts_take_the_slots_after_the_routed_ones",
                "unit/loading/test_self_check.py::test_a_wrong_layout_is_refused_with_layer_runner_and_error",
            ),
        ),
        8: (
            "target and draft hold different decisions at once",
            (
                f"{RUNNERS}::test_f8_target_and_draft_hold_different_answers_before_and_after_they_ran",
                f"{RUNNERS}::test_f8_the_reverse_the_draft_in_eight_bits_is_separate_and_its_target_is_fused",
                f"{BUNDLED}::test_f8_f16_a_plain_draft_beside_an_fp8_target_is_judged_by_its_own_tensors",
                f"{BUNDLED}::test_f8_the_reverse_an_fp8_draft_beside_a_plain_target",
                f"{BUNDLED}::test_f8_each_runner_holds_its_own_answer",
            ),
        ),
        9: (
            "building a draft, or failing to, changes nothing of its target",
            (
                f"{APART}::test_f9_a_draft_that_cannot_be_built_leaves_its_target_as_it_was_byte_for_byte",
                f"{APART}::test_f9_from_the_command_line_a_truncated_draft_is_an_error_and_the_target_answers_without_it",
                "e2e/test_isolation.py::test_a_draft_that_fails_to_load_leaves_the_target_as_it_was",
                f"{BUNDLED}::test_a_draft_changes_nothing_in_the_plan_of_its_target",
            ),
        ),
        10: (
            "both runners' decisions can be listed",
            (
                f"{RUNNERS}::test_f10_both_runners_answers_are_listed_with_rule_inputs_and_source",
                "engine/test_llm.py::test_explain_and_ledger_are_json_and_name_both_runners",
            ),
        ),
        11: (
            "no forward reads a decision",
            (
                f"{APART}::test_f11_two_engines_with_opposite_answers_take_turns_token_by_token",
                f"{APART}::test_f11_two_engines_with_opposite_answers_run_on_two_threads",
                "contract/test_source_rules.py::test_nothing_after_the_plan_acts_on_what_was_asked",
                "unit/layers/test_decoder.py::test_no_module_keeps_a_plan",
                "unit/runner/test_expert_runners.py::test_the_layout_of_shared_experts_is_told_by_the_layers",
            ),
        ),
        12: (
            "architecture names are data and no fact of the decision",
            (
                f"{DECISION}::test_f12_every_name_leads_to_one_table_of_conditions_for_target_and_draft",
                f"{DECISION}::test_f12_the_name_of_a_draft_class_is_no_target_and_refused_by_name",
                f"{SHARED}::test_f12_the_name_of_the_architecture_is_no_fact_of_the_decision",
            ),
        ),
        13: (
            "a family without conditions of its own follows the ask",
            (
                f"{LAYOUTS}::test_f13_qwen2_moe_loads_as_asked_and_both_layouts_agree",
                f"{SHARED}::test_a_family_without_conditions_of_its_own_follows_the_ask",
            ),
        ),
        14: (
            "a wrapper hands its body's config and quantization on",
            (
                f"{WRAPPED}::test_f14_a_wrapped_model_gives_the_logits_of_its_body",
                f"{WRAPPED}::test_f14_all_decisions_are_those_of_the_nested_config",
                f"{WRAPPED}::test_f14_quantization_is_handed_to_the_body_wherever_it_is_said",
                f"{WRAPPED}::test_f14_a_wrapper_around_an_encoder_alone_has_nothing_to_decide",
                f"{WRAPPED}::test_f14_a_dense_body_is_refused_by_name_before_anything_is_decided",
                f"{WRAPPERS}::test_the_nested_config_decides_and_not_what_the_wrapper_says_beside_it",
            ),
        ),
        15: (
            "a text model alone and in its wrapper get one decision",
            (
                f"{DECISION}::test_f15_the_text_model_alone_and_inside_its_wrapper_get_the_same_decision",
                f"{DECISION}::test_f15_contradicting_words_beside_the_text_models_config_change_nothing",
                f"{HYBRID}::test_a_wrapped_text_model_is_the_same_as_one_alone",
            ),
        ),
        16: (
            "a draft is asked with the form of its own tensors",
            (
                f"{RUNNERS}::test_f16_a_draft_that_quantisation_left_out_is_plain_loads_whole_and_is_right",
                f"{RUNNERS}::test_f16_a_draft_in_a_wrapper_is_asked_with_the_form_of_its_own_tensors",
            ),
        ),
        17: (
            "a draft's loader follows its decoder's layout",
            (
                f"{RUNNERS}::test_f17_every_tensor_of_the_draft_has_one_place_whatever_its_layout",
                f"{RUNNERS}::test_f17_a_loaded_draft_took_every_tensor_of_its_layer_once",
                f"{BUNDLED}::test_f17_the_drafts_names_follow_its_layout_in_both",
                "contract/test_injected_faults.py::"
                "test_names_that_follow_the_ask_do_not_pass_for_those_of_a_draft_that_was_laid_out_otherwise",
                "contract/test_injected_faults.py::"
                "test_the_rules_on_the_source_name_a_patch_that_brings_the_fault_back",
            ),
        ),
        18: (
            "a draft is asked every question of its target",
            (
                f"{FAMILIES}::test_f18_a_draft_is_asked_every_question_of_its_target",
                f"{FAMILIES}::test_f18_a_draft_that_misses_the_question_is_named",
                f"{FAMILIES}::test_f18_a_draft_cannot_be_registered_without_its_derivation_from_a_target",
                f"{FAMILIES}::test_the_text_names_every_entry_and_every_pair",
            ),
        ),
        21: (
            "every stored tensor is accounted for",
            (
                f"{TENSORS}::test_f21_a_renamed_tensor_of_a_shared_expert_is_named_with_what_was_expected",
                f"{TENSORS}::test_f21_a_tensor_too_many_is_an_error_unless_a_glob_leaves_it_out",
                f"{TENSORS}::test_f21_a_glob_may_not_hide_a_tensor_that_another_layout_would_place",
                "families/test_expert_tampering.py::test_a_tampered_tensor_of_a_target_is_refused_by_name",
            ),
        ),
        22: (
            "every parameter is filled once",
            (
                f"{TENSORS}::test_f22_a_missing_tensor_is_named_with_what_it_would_fill",
                f"{TENSORS}::test_f22_a_missing_shard_is_named",
                f"{TENSORS}::test_f22_weights_that_are_there_twice_are_named",
                f"{TENSORS}::test_f22_a_missing_scale_is_named",
                f"{TENSORS}::test_f22_a_stored_head_that_differs_from_the_embedding_it_is_tied_to_is_named_with_it",
                f"{TENSORS}::test_f22_a_draft_s_copy_that_differs_from_its_target_is_named_with_it",
                "unit/arch/test_moe_rules.py::test_the_rules_fill_every_parameter_exactly_once",
            ),
        ),
        23: (
            "the accept length is visible, and its collapse is loud",
            (
                f"{ACCEPTANCE}::test_f23_a_draft_that_is_its_target_has_nearly_every_token_accepted",
                f"{ACCEPTANCE}::test_f23_a_fault_that_loads_is_told_with_numbers_and_changes_the_health",
                f"{ACCEPTANCE}::test_f23_a_slot_that_was_zeroed_collapses_in_both_layouts",
                "e2e/test_nextn.py::test_run_ends_with_the_two_runners_decisions_and_the_accept_length",
            ),
        ),
        24: (
            "the answer does not depend on the draft",
            (
                f"{ACCEPTANCE}::test_f24_answers_are_those_of_plain_decoding_whatever_the_draft_does",
                f"{ACCEPTANCE}::test_f24_rejection_sampling_with_a_bundled_draft_follows_the_targets_distribution",
                f"{ACCEPTANCE}::test_f24_an_algorithm_that_is_not_there_yet_is_refused_by_name_and_nothing_else_drafts",
                "speculative/test_lossless_matrix.py::test_speculative_output_is_plain_output",
                "speculative/test_verifier.py::test_rejection_with_keyed_noise_follows_the_target_distribution",
            ),
        ),
        25: (
            "three kernels of linear attention per runner, frozen",
            (
                f"{LINEAR}::test_f25_each_runner_has_three_frozen_kernels_that_explain_prints",
                f"{BUILT}::test_f25_what_explain_says_of_each_phase_is_built_and_runs",
            ),
        ),
        26: (
            "a phase's flag, then the runner's own default, then the base flag; verify follows decode",
            (
                f"{LINEAR}::test_f26_a_phase_flag_goes_before_the_base_flag_and_verify_follows_decode",
                f"{LINEAR}::test_f26_the_runners_own_default_stands_between_phase_flag_and_base_flag",
                f"{LINEAR}::test_f26_a_base_setting_is_known_as_one_in_every_spelling",
                f"{LINEAR}::test_f26_a_phase_setting_is_known_as_one_in_every_spelling",
                f"{LINEAR}::"
                "test_f26_without_its_default_a_runner_obeys_the_base_flag_and_the_plan_says_what_stood_against_it",
                f"{LINEAR}::test_f26_a_verify_says_that_it_follows_decode_and_why_not_where_it_cannot",
            ),
        ),
        27: (
            "where a kernel was asked for, no condition of the default is looked at",
            (
                f"{LINEAR}::test_f27_an_explicit_kernel_reads_its_own_conditions_only",
                f"{LINEAR}::test_f27_with_an_explicit_kernel_no_fact_of_another_or_of_the_default_is_ever_read",
                f"{LINEAR}::test_f27_the_same_host_stops_a_phase_that_is_left_to_the_engine",
                f"{LINEAR}::test_f27_a_verify_that_follows_decode_reads_that_kernel_only",
            ),
        ),
        28: (
            "a default is never written back as if it was asked for",
            (
                f"{LINEAR}::test_f28_a_default_is_never_written_back_as_if_asked",
                f"{BUILT}::test_f28_after_start_a_default_stands_as_auto_beside_the_kernel_that_runs",
                f"{BUILT}::test_f28_a_dumped_intent_holds_what_was_asked_and_no_default",
            ),
        ),
        29: (
            "a second runner does not replace the first one's kernels",
            (
                f"{BUILT}::test_f29_a_second_runner_changes_neither_plan_nor_kernels_of_the_first",
                f"{PAIRS}::test_f29_a_second_runner_leaves_the_firsts_plan_and_digest_as_they_are",
                f"{PAIRS}::test_f29_whatever_is_asked_of_the_second_runner_the_firsts_digest_stays",
                f"{PAIRS}::test_f29_a_second_runner_that_cannot_be_planned_says_so_and_leaves_the_first_alone",
            ),
        ),
        30: (
            "a draft may hold other kernels than its target",
            (
                f"{BUILT}::test_f30_both_runners_kernels_are_used_each_its_own",
                f"{PAIRS}::test_f30_a_draft_may_hold_other_kernels_than_its_target",
                f"{PAIRS}::test_f30_a_draft_never_inherits_its_targets_answer",
                f"{PAIRS}::test_f30_a_flag_without_a_role_is_asked_of_both",
            ),
        ),
        31: (
            "without a plan there is no kernel, and nothing to fall back to",
            (
                "unit/layers/test_delta.py::test_f31_a_layer_without_a_plan_for_it_is_a_type_error",
                "unit/runner/test_states.py::test_f31_a_plan_that_names_no_kernel_builds_no_linear_attention",
                "plan/test_kernel_plugins.py::test_f31_without_a_plan_there_is_no_backend",
                f"{BUILT}::test_f31_nobody_can_hand_an_engine_a_kernel_or_a_plan",
            ),
        ),
        32: (
            "a kernel that cannot run in its phase, family or host is an error naming those that can",
            (
                f"{LINEAR}::"
                "test_f32_a_kernel_that_cannot_run_in_its_phase_family_or_host_is_an_error_that_names_those_that_can",
                f"{LINEAR}::test_f32_a_word_that_nobody_knows_is_refused_with_the_known_ones",
                f"{LINEAR}::test_f32_under_auto_the_same_kernel_is_passed_over_and_listed",
                f"{BUILT}::"
                "test_f32_a_kernel_whose_self_test_failed_is_refused_by_name_and_passed_over_where_it_is_not_asked_for",
                f"{BUILT}::test_f32_an_engine_is_not_built_with_a_kernel_that_cannot_run_here",
            ),
        ),
        33: (
            "all kernels agree, and undo a rejected proposal exactly",
            (
                "kernels/test_delta.py::test_f33_every_phase_and_cutting_gives_the_recurrent_results_and_state",
                "kernels/test_delta.py::test_f33_every_shape_and_type_gives_the_reference_results",
                "kernels/test_delta_rollback.py::test_f33_a_state_per_verified_row_is_that_of_plain_decoding",
                "kernels/test_delta_rollback.py::test_f33_kept_inputs_applied_again_leave_the_state_of_plain_decoding",
                "plan/test_delta_kernels.py::test_f33_trees_are_a_matter_of_the_verify_alone",
                "unit/runner/test_states.py::"
                "test_after_any_accepted_count_state_and_next_logits_are_those_of_plain_decoding",
                "speculative/test_hybrid_lossless.py::test_speculative_output_is_plain_output",
            ),
        ),
        34: (
            "a kernel of full attention per runner and phase",
            (
                f"{PAIRS}::test_f34_each_runner_holds_its_own_attention_kernel_per_phase",
                f"{BUILT}::test_f34_each_runner_attends_by_the_kernel_of_its_own_plan_in_every_phase",
                f"{BUILT}::test_f34_two_arrangements_of_one_cache_are_refused_in_the_runner_that_asks_for_them",
            ),
        ),
        37: (
            "one experts kernel per runner, from building to running",
            (
                f"{RUNNERS}::test_f37_each_runner_runs_the_experts_kernel_of_its_plan_from_start_to_end",
                "plan/test_expert_kernels.py::"
                "test_f37_each_runner_holds_its_own_experts_kernel_and_an_ask_for_one_is_not_the_others",
            ),
        ),
        38: (
            "the draft of a hybrid has no linear attention to decide about",
            (
                f"{RUNNERS}::test_f38_the_draft_of_a_hybrid_has_no_linear_layers_and_says_so",
                f"{RUNNERS}::test_f38_a_hybrid_that_cannot_be_is_refused",
            ),
        ),
        39: (
            "a type that cannot compute falls back by one rule in both runners",
            (
                f"{DECISION}::test_f39_a_type_that_cannot_compute_falls_back_by_one_rule_in_both_runners",
                f"{BUNDLED}::test_f39_a_type_that_cannot_compute_falls_back_by_one_rule_in_both_runners",
            ),
        ),
        40: (
            "one line per decision and runner",
            (
                f"{RUNNERS}::test_f40_one_line_per_decision_and_one_per_runner",
                f"{BUNDLED}::test_f40_the_table_has_one_line_per_decision_for_both_runners",
            ),
        ),
    }
)

LOGITS = f"{WRAPPED}::test_f14_a_wrapped_model_gives_the_logits_of_its_body"
NO_TEXT = f"{WRAPPED}::test_f14_a_wrapper_around_an_encoder_alone_has_nothing_to_decide"
REFUSED = f"{WRAPPED}::test_f14_entries_that_are_known_and_not_built_are_refused_by_name"
WRAPPER_ROWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "KimiK25ForConditionalGeneration": (
            LOGITS, NO_TEXT, f"{WRAPPERS}::test_a_whole_wrapped_config_of_kimi_k25_is_read",
        ),
        "KimiVLForConditionalGeneration": (
            LOGITS, NO_TEXT,
            f"{WRAPPERS}::test_kimi_vl_reads_the_router_of_its_text_config_not_the_architecture_named_in_it",
        ),
        "DotsVLMForCausalLM": (
            LOGITS, NO_TEXT, f"{WRAPPERS}::test_dots_may_keep_the_text_models_keys_at_the_top",
            f"{WRAPPED}::test_f14_a_bundled_draft_goes_into_the_wrapper_with_its_target",
        ),
        "DeepseekVL2ForCausalLM": (
            LOGITS, NO_TEXT, f"{WRAPPERS}::test_a_dense_body_is_refused_by_name",
            f"{WRAPPED}::test_f14_a_dense_body_is_refused_by_name_before_anything_is_decided",
            f"{WRAPPED}::test_f14_deepseek_vl2_hands_no_quantization_over_so_eight_bits_are_refused_and_plain_weights_are_"
            "plain",
        ),
        "DeepseekOCRForCausalLM": (
            LOGITS, f"{WRAPPERS}::test_deepseek_ocr_with_v3s_router_is_v3_whatever_use_mla_says",
            f"{WRAPPED}::test_f14_a_dense_body_is_refused_by_name_before_anything_is_decided", REFUSED,
        ),
        "PixtralForConditionalGeneration": (
            LOGITS, f"{WRAPPERS}::test_the_body_of_mistral_3_and_pixtral_follows_the_model_type",
            f"{WRAPPED}::test_f14_a_dense_text_model_in_a_wrapper_says_that_shared_experts_do_not_apply",
        ),
        "MiniCPMV, MiniCPMV4_6, MiniCPMV4_7": (
            LOGITS, f"{HYBRID}::test_minicpm_v_has_a_qwen3_5_inside", REFUSED,
        ),
        "Qwen3_5ForCausalLMMTP": (
            f"{RUNNERS}::test_f16_a_draft_in_a_wrapper_is_asked_with_the_form_of_its_own_tensors", REFUSED,
        ),
        "qwen3_5_text.*": (
            LOGITS, f"{DECISION}::test_f15_the_text_model_alone_and_inside_its_wrapper_get_the_same_decision",
        ),
        "BailingMoeV3VL": (REFUSED,),
        "MiniMaxM3 VL, GLM-5 Next, GLM-4V, GLM-OCR": (
            REFUSED, f"{WRAPPERS}::test_known_entries_that_are_not_built_are_refused_by_name_with_what_is_missing",
        ),
    }
)  # fmt: skip


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def lacks(node: str) -> str | None:
    """What is wrong with a test that a row names."""
    file, _, name = node.partition("::")
    if not (TESTS / file).is_file():
        return f"{file} is not there"
    if not name.startswith("test_") or name not in functions(TESTS / file):
        return f"{file} has no test {name}"
    return None


def test_every_row_that_this_version_must_prove_has_tests() -> None:
    assert tuple(ROWS) == REQUIRED
    assert [number for number, (what, tests) in ROWS.items() if not what or not tests] == []


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_are_there(row: int) -> None:
    _, tests = ROWS[row]
    assert [wrong for node in tests if (wrong := lacks(node))] == []
    assert any(f"test_f{row}_" in node or f"_f{row}_" in node for node in tests)


@pytest.mark.parametrize("row", WRAPPER_ROWS)
def test_the_tests_of_a_wrapper_are_there(row: str) -> None:
    assert [wrong for node in WRAPPER_ROWS[row] if (wrong := lacks(node))] == []


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ("features/test_nothing.py::test_f1_x", "is not there"),
        (f"{DECISION}::test_f1_something_else", "has no test"),
        ("contract/test_feature_rows.py::functions", "has no test"),
    ],
)
def test_a_row_that_names_no_test_is_noticed(node: str, says: str) -> None:
    assert says in str(lacks(node))
