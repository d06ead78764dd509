"""The Python interface on tiny checkpoints: what goes in, what comes out, what is refused, and what close leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from proa import LLM, ConfigError, PlanError, RequestError, SamplingParams
from tests.factories.scripts import script, write_script
from tests.factories.tokenizer import EOS, byte_ids

SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **SETTINGS) as one:
        yield one


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Says "one two three" whatever it is asked, a token per word, then ends."""
    texts = {300: b"one", 301: b" two", 302: b" three"}
    path = write_script(tmp_path_factory.mktemp("script"), script([300, 301, 302]), texts=texts)
    with LLM(path, **SETTINGS) as one:
        yield one


def test_text_and_token_ids_of_the_same_prompt_get_the_same_answer(llm: LLM) -> None:
    by_text, by_ids = llm.generate(
        ["the engine", [263, 277, 269]][:1] + [llm.generate("the engine", GREEDY)[0].prompt_token_ids], GREEDY
    )
    assert by_text.prompt == "the engine"
    assert by_ids.prompt is None
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids
    assert by_text.outputs == by_ids.outputs


def test_one_list_of_token_ids_is_one_prompt(llm: LLM) -> None:
    assert [output.prompt_token_ids for output in llm.generate([10, 11, 12], GREEDY)] == [(10, 11, 12)]
    assert llm.generate([], GREEDY) == []


def test_answers_come_in_the_order_of_the_prompts_with_their_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (9, 2, 5)]
    outputs = llm.generate([[10], [20, 21], [30]], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5]
    assert [output.prompt_token_ids for output in outputs] == [(10,), (20, 21), (30,)]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_the_end_of_text_is_not_shown_and_has_no_stop_reason(spelling: LLM) -> None:
    choice = spelling.generate("x", GREEDY)[0].outputs[0]
    assert (choice.text, choice.token_ids) == ("one two three", (300, 301, 302, EOS))
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_a_stop_token_id_is_the_stop_reason(spelling: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[301])
    choice = spelling.generate("x", params)[0].outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one", "stop", 301)


def test_bad_words_are_kept_out_at_the_start_and_after_a_space(tmp_path: Path) -> None:
    # The runner-up of " two" is " four"; encoding " two" gives bytes, whose last one the model never wanted anyway.
    texts = {300: b"one", 302: b" three"}
    space_b, space_c = byte_ids("b")[0], byte_ids("c")[0]
    path = write_script(
        tmp_path, {300: space_b, space_b: 302}, other=300, runner_up={300: space_c, space_c: 302}, texts=texts
    )
    with LLM(path, **SETTINGS) as llm:
        free = llm.generate("x", SamplingParams(temperature=0.0, max_tokens=2))[0].outputs[0].text
        bound = llm.generate("x", SamplingParams(temperature=0.0, max_tokens=2, bad_words=["b"]))[0].outputs[0].text
    assert (free, bound) == ("oneb", "onec")


def test_a_conversation_goes_through_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the plan"}]
    assert llm.render(messages) == "<bos><|user|>the plan\n<|assistant|>"
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids[:2] == (0, 3)
    assert output.prompt_token_ids[-1] == 4
    assert [one.outputs for one in llm.chat([messages, messages], GREEDY)] == [output.outputs] * 2


def test_a_model_without_a_template_says_so(tiny: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    path = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    with LLM(path, **SETTINGS) as llm:
        assert not llm.has_chat_template
        with pytest.raises(RequestError, match=r"request/no-chat-template"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_the_pieces_of_a_stream_are_the_text_of_the_answer(llm: LLM) -> None:
    stream = llm.stream("the engine", GREEDY)
    pieces = list(stream)
    assert "".join(pieces) == llm.generate("the engine", GREEDY)[0].outputs[0].text == stream.output().outputs[0].text
    assert len(pieces) > 1


def test_a_closed_stream_ends_its_request_and_keeps_what_was_said(llm: LLM) -> None:
    stream = llm.stream("the engine", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert stream.output().outputs[0].finish_reason == "abort"
    assert 0 < stream.output().metrics.num_output_tokens < 100
    assert list(stream) == []
    del stream
    llm.generate([10], GREEDY)
    assert llm.stats()["num_requests_running"] == 0


def test_a_stream_that_is_dropped_unread_leaves_nothing_running(llm: LLM) -> None:
    llm.stream("the engine", GREEDY)
    llm.generate([10], SamplingParams(temperature=0.0, max_tokens=1))
    assert (llm.stats()["num_requests_running"], llm.stats()["num_requests_waiting"]) == (0, 0)


def test_logprobs_hold_the_emitted_token_first_and_sum_up(llm: LLM) -> None:
    choice = llm.generate([10, 11], SamplingParams(temperature=1.0, seed=5, max_tokens=6, logprobs=3))[0].outputs[0]
    assert [next(iter(row)) for row in choice.logprobs] == list(choice.token_ids)
    assert all(3 <= len(row) <= 4 for row in choice.logprobs)
    assert choice.cumulative_logprob == pytest.approx(
        sum(row[t].logprob for t, row in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    for row in choice.logprobs:
        assert all(math.isfinite(entry.logprob) and entry.logprob <= 0 for entry in row.values())
        ranked = sorted(row.values(), key=lambda entry: entry.rank)
        assert [entry.logprob for entry in ranked] == sorted((entry.logprob for entry in ranked), reverse=True)


def test_prompt_logprobs_have_an_entry_for_every_token_but_the_first(spelling: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (output,) = spelling.generate([300, 301, 40], params)
    first, second, third = output.prompt_logprobs
    assert first is None
    assert second[301].rank == 1
    assert second[301].logprob == pytest.approx(-511 * math.exp(-20), abs=1e-4)
    assert third[40].logprob == pytest.approx(-20.0, abs=1e-3)


def test_a_seed_repeats_an_answer_and_no_seed_does_not(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.5, seed=3, max_tokens=12)
    unseeded = SamplingParams(temperature=1.5, max_tokens=12)
    assert llm.generate([10], seeded)[0].outputs == llm.generate([10], seeded)[0].outputs
    answers = {output.outputs[0].token_ids for output in llm.generate([[10]] * 4, unseeded)}
    assert len(answers) == 4


def test_a_seeded_answer_is_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12) for seed in range(6)]
    prompts = [[10 + seed] * (1 + 3 * seed) for seed in range(6)]
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [output.outputs for output in together] == [output.outputs for output in alone]


def test_generation_config_gives_the_defaults_of_a_call_without_params(tmp_path: Path) -> None:
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "eos_token_id": [1, 302],
    }
    path = write_script(tmp_path / "sampled", script([300, 301, 302, 303]), generation=generation)
    with LLM(path, **SETTINGS) as llm:
        params = llm.default_params(max_tokens=5)
        assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.6, 20, 0.95, 1.1)
        assert llm.generate("x")[0].outputs[0].token_ids == (300, 301, 302)
    path = write_script(tmp_path / "greedy", script([300]), generation={"do_sample": False, "temperature": 0.6})
    with LLM(path, **SETTINGS) as llm:
        assert llm.default_params().temperature == 0.0


@pytest.mark.parametrize(
    ("prompt", "params", "slug"),
    [
        ([600], GREEDY, "request/token-id"),
        ([-1], GREEDY, "request/token-id"),
        ([[]], GREEDY, "request/empty-prompt"),
        ([10] * 200, GREEDY, "request/too-long"),
        ([10], SamplingParams(logit_bias={5000: 1.0}), "request/sampling-params"),
        ([[10], [11]], [GREEDY], "request/params-count"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_leaves_nothing_behind(
    llm: LLM, prompt, params, slug: str
) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(prompt, params)
    assert refused.value.slug == slug
    assert (llm.stats()["num_requests_running"], llm.stats()["num_requests_waiting"]) == (0, 0)


def test_one_refused_prompt_ends_the_others_of_its_call(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate([[10], [600]], GREEDY)
    assert llm.stats()["num_requests_waiting"] == 0


def test_more_than_one_answer_cannot_be_streamed(llm: LLM) -> None:
    with pytest.raises(RequestError, match="request/not-supported"):
        llm.stream("x", SamplingParams(n=2))


def test_settings_have_the_flags_names_and_unknown_ones_are_refused(tiny: Callable[..., Path]) -> None:
    with LLM(tiny("qwen2"), dtype="float32", page_size=4, threads=1, target_kv_dtype="bfloat16") as llm:
        decisions = llm.explain()["runners"]["target"]["decisions"]
        assert (decisions["kv_dtype"]["value"], decisions["kv_dtype"]["source"]) == ("bfloat16", "asked")
    with pytest.raises(ConfigError, match="page_size"):
        LLM(tiny("qwen2"), pagesize=4)


def test_metrics_count_tokens_and_seconds(llm: LLM) -> None:
    metrics = llm.generate([10, 11, 12], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].metrics
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens, metrics.num_cached_tokens) == (3, 8, 0)
    assert 0 < metrics.time_to_first_token < metrics.total_seconds
    assert metrics.tokens_per_second > 0
    assert metrics.speculative_decoding is None


def test_explain_and_ledger_are_json_and_name_both_runners(tiny: Callable[..., Path]) -> None:
    with LLM(tiny("llama"), draft=tiny("qwen3", seed=3), **SETTINGS) as llm:
        explained, ledger = json.loads(json.dumps(llm.explain())), json.loads(json.dumps(llm.ledger()))
    assert set(explained) >= {"runners", "pair", "digest"}
    assert explained["pair"]["algorithm"] == "standalone"
    for role in ("target", "draft"):
        assert explained["runners"][role]["role"] == role
        parameters = ledger["runners"][role]["parameters"]
        assert (
            parameters["total"]
            == parameters["filled"] + parameters["tied"] + parameters["borrowed"] + parameters["computed"]
        )
        assert (ledger["runners"][role]["unexpected"], ledger["runners"][role]["missing"]) == ([], [])
    assert ledger["unclaimed"] == []


def test_closing_twice_is_fine_and_a_closed_llm_says_so(tiny: Callable[..., Path]) -> None:
    llm = LLM(tiny("qwen2"), **SETTINGS)
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match="request/closed"):
        llm.generate("x")


def test_two_llms_on_two_threads_answer_as_each_does_alone(tiny: Callable[..., Path]) -> None:
    paths = [tiny("llama"), tiny("qwen3")]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=16, logprobs=2)
    prompts = [[10, 11, 12], [40, 41]]
    alone = []
    for path in paths:
        with LLM(path, **SETTINGS) as llm:
            alone.append([output.outputs for output in llm.generate(prompts, params)])
    together: dict[int, object] = {}

    def serve(number: int) -> None:
        with LLM(paths[number], **SETTINGS) as llm:
            together[number] = [output.outputs for output in llm.generate(prompts, params)]

    threads = [Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[0], together[1]] == alone


def test_several_threads_may_share_one_llm(llm: LLM) -> None:
    prompts = [[10 + i] * (i + 1) for i in range(4)]
    alone = [llm.generate([prompt], GREEDY)[0].outputs for prompt in prompts]
    together: dict[int, object] = {}
    threads = [
        Thread(target=lambda i=i: together.update({i: llm.generate([prompts[i]], GREEDY)[0].outputs})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(4)] == alone


def test_a_draft_that_does_not_exist_is_an_error_before_anything_is_loaded(tiny: Callable[..., Path]) -> None:
    from proa import CheckpointError

    with pytest.raises(CheckpointError, match="no-such-draft"):
        LLM(tiny("llama"), draft="no-such-draft", **SETTINGS)
    with pytest.raises((PlanError, ConfigError)):
        LLM(tiny("llama"), speculative="standalone", **SETTINGS)
