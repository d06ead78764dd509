from __future__ import annotations

from typing import Any

import pytest

from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

_ONE_OF_EACH = {"int": 3, "float": 0.5, "str": "silu", "flag": True, "list": [1, 2], "sub": {"x": 1}}


def view(**values: Any) -> HFView:
    return HFView(values, where="config.json")


@pytest.mark.parametrize("kind", _ONE_OF_EACH)
def test_a_typed_read_gives_the_value(kind: str) -> None:
    value = getattr(view(**_ONE_OF_EACH), kind)(kind)
    if kind == "sub":
        assert value.int("x") == 1
    else:
        assert value == (tuple(_ONE_OF_EACH[kind]) if kind == "list" else _ONE_OF_EACH[kind])


@pytest.mark.parametrize("kind", _ONE_OF_EACH)
@pytest.mark.parametrize("other", _ONE_OF_EACH)
def test_a_value_of_another_type_is_an_error_naming_file_and_key(kind: str, other: str) -> None:
    if kind == other or (kind, other) == ("float", "int"):
        return
    with pytest.raises(ConfigError, match=rf"config\.json: {other} must be ") as error:
        getattr(view(**_ONE_OF_EACH), kind)(other)
    assert error.value.slug == "config/wrong-type"


@pytest.mark.parametrize("kind", _ONE_OF_EACH)
@pytest.mark.parametrize(("values", "state"), [({}, "missing"), ({"depth": None}, "null")])
def test_a_key_without_value_and_default_is_an_error_naming_file_and_key(
    kind: str, values: dict[str, Any], state: str
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: depth is {state}") as error:
        getattr(view(**values), kind)("depth")
    assert error.value.slug == "config/missing-key"


@pytest.mark.parametrize("values", [{}, {"depth": None}])
def test_a_key_without_value_takes_the_default_even_none(values: dict[str, Any]) -> None:
    config = view(**values)
    assert config.int("depth", default=None) is None
    assert config.int("depth", default=7) == 7
    assert config.flag("depth", default=False) is False
    assert config.list("depth", default=()) == ()
    assert config.get("depth", "x") == "x"


def test_true_is_neither_an_integer_nor_a_number_and_an_integer_is_a_number() -> None:
    with pytest.raises(ConfigError, match="must be an integer, but is true"):
        view(n=True).int("n")
    with pytest.raises(ConfigError, match="must be a number, but is false"):
        view(n=False).float("n")
    with pytest.raises(ConfigError, match="must be an integer, but is 1.0"):
        view(n=1.0).int("n")
    with pytest.raises(ConfigError, match="too large"):
        view(n=10**400).float("n")
    number = view(n=10000).float("n")
    assert number == 10000.0 and type(number) is float


def test_reads_are_remembered_and_looking_is_not_a_read() -> None:
    config = view(a=1, b=None, c=3)
    assert config.keys() == ("a", "b", "c")
    assert config.has("a") and not config.has("b") and not config.has("z")
    assert config.read == frozenset()
    config.int("a")
    config.int("z", default=0)
    assert config.read == {"a", "z"}


def test_values_cannot_be_changed_through_the_view_or_behind_it() -> None:
    values = {"scaling": {"factor": 2.0}, "names": ["x"]}
    config = HFView(values, where="config.json")
    values["names"].append("y")
    values["scaling"]["factor"] = 3.0
    assert config.list("names") == ("x",)
    assert config.get("scaling", None)["factor"] == 2.0
    with pytest.raises(TypeError):
        config.get("scaling", None)["factor"] = 4.0


def test_errors_of_a_nested_view_name_the_whole_path() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: vision\.deep\.size is missing"):
        view(vision={"deep": {}}).sub("vision").sub("deep").int("size")


class TestNested:
    def inner(self, outer: HFView, key: str | None = "text_config", **more: Any) -> HFView:
        return outer.nested(key, inherited=("eos_token_id", "tied"), without=("vision_config",), overrides=more)

    def test_the_nested_object_is_what_is_read_and_the_wrapper_is_remembered(self) -> None:
        outer = view(vision_config={"depth": 1}, text_config={"hidden_size": 4})
        inner = self.inner(outer)
        assert inner.int("hidden_size") == 4
        assert inner.wrapper is outer and outer.wrapper is None
        assert "text_config" in outer.read
        with pytest.raises(ConfigError, match=r"config\.json: text_config\.depth is missing"):
            inner.int("depth")

    def test_keys_of_the_wrapper_are_inherited_where_the_nested_object_is_silent(self) -> None:
        inner = self.inner(view(tied=True, eos_token_id=7, bos=1, text_config={"tied": False, "eos_token_id": None}))
        assert inner.flag("tied") is False
        assert inner.int("eos_token_id") == 7
        assert not inner.has("bos")

    def test_some_keys_are_left_out_and_some_put_in(self) -> None:
        inner = self.inner(view(text_config={"vision_config": {}, "architectures": ["Inner"]}), architectures=["X"])
        assert not inner.has("vision_config")
        assert inner.list("architectures") == ("X",)

    def test_a_flat_config_can_be_its_own_text_model(self) -> None:
        inner = self.inner(view(hidden_size=4, vision_config={}), key=None)
        assert inner.keys() == ("hidden_size",)
        with pytest.raises(ConfigError, match=r"config\.json: depth is missing"):
            inner.int("depth")

    def test_what_is_nested_must_be_an_object(self) -> None:
        with pytest.raises(ConfigError, match="text_config must be an object"):
            self.inner(view(text_config=[1]))


class TestRope:
    def said(self, **values: Any) -> dict[str, Any]:
        rope = view(**values).rope()
        names = rope.keys()
        return {key: rope.get(key, None) for key in names}

    def test_without_any_key_it_is_the_plain_rope_of_base_ten_thousand(self) -> None:
        assert self.said() == {"rope_type": "default", "rope_theta": 10000.0}

    def test_theta_alone_is_the_plain_rope(self) -> None:
        assert self.said(rope_theta=500000, rope_scaling=None) == {"rope_type": "default", "rope_theta": 500000.0}

    @pytest.mark.parametrize(
        "scaling", [{"type": "linear"}, {"rope_type": "linear"}, {"type": "linear", "rope_type": "linear"}]
    )
    def test_old_and_new_spellings_say_the_same(self, scaling: dict[str, Any]) -> None:
        expected = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
        assert self.said(rope_theta=1e6, rope_scaling=scaling | {"factor": 4.0}) == expected
        assert self.said(rope_parameters=scaling | {"factor": 4.0, "rope_theta": 1e6}) == expected
        assert self.said(rope_theta=1e6, rope_parameters=scaling | {"factor": 4.0}) == expected

    def test_both_spellings_may_be_there_when_they_agree(self) -> None:
        scaling = {"rope_type": "linear", "factor": 2.0}
        both = {"rope_theta": 1e4, "rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": 1e4}}
        assert self.said(**both)["factor"] == 2.0

    @pytest.mark.parametrize(
        "values",
        [
            {"rope_scaling": {"type": "linear", "rope_type": "yarn"}},
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
        ],
    )
    def test_a_contradiction_is_refused(self, values: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"config\.json: rope_") as error:
            self.said(**values)
        assert error.value.slug == "config/rope-contradiction"

    def test_parameters_by_layer_type_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="rope_parameters differs by layer type") as error:
            self.said(rope_parameters={"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}})
        assert error.value.slug == "config/rope-per-layer"

    def test_a_missing_parameter_is_named_with_its_place(self) -> None:
        rope = view(rope_scaling={"type": "linear"}).rope()
        with pytest.raises(ConfigError, match=r"config\.json: rope_scaling\.factor is missing"):
            rope.float("factor")

    def test_all_spellings_count_as_read(self) -> None:
        config = view(rope_theta=1e4, rope_scaling={"type": "linear"})
        config.rope()
        assert config.read >= {"rope_theta", "rope_scaling", "rope_parameters"}

    def test_a_theta_of_zero_is_not_taken_for_a_missing_one(self) -> None:
        assert (
            self.said(rope_theta=0)["rope_theta"] == self.said(rope_parameters={"rope_theta": 0})["rope_theta"] == 0.0
        )

    @pytest.mark.parametrize(
        "values", [{"rope_theta": "1e6"}, {"rope_scaling": "linear"}, {"rope_scaling": {"type": 3}}]
    )
    def test_a_wrong_type_is_refused(self, values: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="must be"):
            self.said(**values)
