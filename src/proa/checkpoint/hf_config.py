"""A read-only view of a config.json: typed access, errors that name file and key, a memory of the keys that were read.

Owns the spellings that changed over the years (rope keys). Does not know which keys exist.
"""

from __future__ import annotations

import builtins
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, TypeVar, overload

from proa.checkpoint.strict_json import freeze
from proa.errors import ConfigError

D = TypeVar("D")


class _Default(Enum):
    REQUIRED = "required"


_REQUIRED = _Default.REQUIRED
_DEFAULT_THETA = 10000.0  # what every dense family of the hub means by a config without rope_theta


class HFView:
    """Deep-frozen values of one JSON object.

    A key that is absent or null has no value: it takes the default, or is an error where there is none. Asking for a
    value is remembered in `read`, also when the key is absent; `has` and `keys` are not reads. `where` names the file,
    `wrapper` is the outer view when this one is the config of a text model inside it.
    """

    __slots__ = ("_prefix", "_read", "_values", "where", "wrapper")

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        where: builtins.str,
        wrapper: HFView | None = None,
        prefix: builtins.str = "",
    ) -> None:
        self._values: Mapping[builtins.str, Any] = freeze(values)
        self._prefix = prefix
        self._read: set[builtins.str] = set()
        self.where = where
        self.wrapper = wrapper

    def __repr__(self) -> builtins.str:
        return f"HFView({self.where}{': ' + self._prefix if self._prefix else ''}, {len(self._values)} keys)"

    @property
    def read(self) -> frozenset[builtins.str]:
        """Every key that was asked for."""
        return frozenset(self._read)

    def keys(self) -> tuple[builtins.str, ...]:
        """All keys of the file's object, null ones included, in file order."""
        return tuple(self._values)

    def has(self, key: builtins.str) -> bool:
        """The key is there and not null."""
        return self._values.get(key) is not None

    def get(self, key: builtins.str, default: Any) -> Any:
        """The frozen value of any type (mappings are read-only, lists are tuples)."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    @overload
    def int(self, key: builtins.str) -> builtins.int: ...
    @overload
    def int(self, key: builtins.str, default: D) -> builtins.int | D: ...
    def int(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        """An integer; true, 1.0 and "1" are not integers."""
        return self._typed(key, default, (builtins.int,), "an integer")

    @overload
    def float(self, key: builtins.str) -> builtins.float: ...
    @overload
    def float(self, key: builtins.str, default: D) -> builtins.float | D: ...
    def float(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        """A number, as float; integers are numbers, true is not."""
        value = self._typed(key, default, (builtins.int, builtins.float), "a number")
        if type(value) is not builtins.int:
            return value
        try:
            return builtins.float(value)
        except OverflowError as error:
            raise ConfigError(
                "config/wrong-type", f"{self.where}: {self._name(key)} is too large for a number"
            ) from error

    @overload
    def str(self, key: builtins.str) -> builtins.str: ...
    @overload
    def str(self, key: builtins.str, default: D) -> builtins.str | D: ...
    def str(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        return self._typed(key, default, (builtins.str,), "a string")

    @overload
    def flag(self, key: builtins.str) -> bool: ...
    @overload
    def flag(self, key: builtins.str, default: D) -> bool | D: ...
    def flag(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        return self._typed(key, default, (bool,), "true or false")

    @overload
    def list(self, key: builtins.str) -> tuple[Any, ...]: ...
    @overload
    def list(self, key: builtins.str, default: D) -> tuple[Any, ...] | D: ...
    def list(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        """A list, as tuple of frozen values."""
        return self._typed(key, default, (tuple,), "a list")

    def sub(self, key: builtins.str) -> HFView:
        """The view of a nested object, with its own memory of reads."""
        value = self._typed(key, _REQUIRED, (Mapping,), "an object")
        return HFView(value, where=self.where, prefix=self._name(key) + ".")

    def nested(
        self,
        key: builtins.str | None,
        *,
        inherited: Collection[builtins.str],
        without: Collection[builtins.str],
        overrides: Mapping[builtins.str, Any],
    ) -> HFView:
        """The config of the text model inside this one: the object under `key`, or this config itself (None).

        Where it is silent, the wrapper's values of `inherited` hold; `without` are left out and `overrides` put in.
        """
        values = dict(self._values) if key is None else dict(self.sub(key)._values)
        self._read.update(inherited if key is None else (key, *inherited))
        values |= {name: self._values[name] for name in inherited if self.has(name) and values.get(name) is None}
        values = {name: value for name, value in values.items() if name not in without} | dict(overrides)
        prefix = self._prefix if key is None else self._name(key) + "."
        return HFView(values, where=self.where, wrapper=self, prefix=prefix)

    def rope(self) -> HFView:
        """Rope parameters in one spelling: `rope_type`, `rope_theta`, and whatever else the file says about rope.

        Knows `rope_theta` + `rope_scaling` (with `type` or `rope_type`) and `rope_parameters`. Both spellings may be
        there if they agree. Per-layer-type parameters and contradictions are ConfigErrors.
        """
        theta = self.float("rope_theta", default=None)
        found = [self._rope_object(key, theta) for key in ("rope_parameters", "rope_scaling") if self._asked(key)]
        if len(found) == 2 and found[0] != found[1]:
            raise ConfigError(
                "config/rope-contradiction", f"{self.where}: rope_parameters and rope_scaling do not say the same"
            )
        plain = {"rope_type": "default", "rope_theta": _DEFAULT_THETA if theta is None else theta}
        key = "rope_parameters" if self.has("rope_parameters") else "rope_scaling"
        return HFView(found[0] if found else plain, where=self.where, prefix=self._name(key) + ".")

    def _rope_object(self, key: builtins.str, theta: builtins.float | None) -> dict[builtins.str, Any]:
        view = self.sub(key)
        if any(isinstance(value, Mapping) for value in view._values.values()):
            raise ConfigError(
                "config/rope-per-layer", f"{self.where}: {self._name(key)} differs by layer type: not supported"
            )
        kinds = {name: view.str(name) for name in ("rope_type", "type") if view.has(name)}
        inner = view.float("rope_theta", default=theta)
        if len(set(kinds.values())) > 1 or (theta is not None and inner != theta):
            said = {**kinds, "rope_theta": [theta, inner]}
            raise ConfigError(
                "config/rope-contradiction", f"{self.where}: {self._name(key)} contradicts itself: {said}"
            )
        rest = {name: value for name, value in view._values.items() if name not in ("type", "rope_type", "rope_theta")}
        kind = next(iter(kinds.values()), "default")
        return {"rope_type": kind, "rope_theta": _DEFAULT_THETA if inner is None else inner, **rest}

    def _asked(self, key: builtins.str) -> bool:
        self._read.add(key)
        return self.has(key)

    def _typed(self, key: builtins.str, default: Any, types: tuple[type, ...], kind: builtins.str) -> Any:
        value = self.get(key, default)
        if value is _REQUIRED:
            state = "null" if key in self._values else "missing"
            raise ConfigError("config/missing-key", f"{self.where}: {self._name(key)} is {state}, and must be {kind}")
        fits = isinstance(value, types) and (type(value) is not bool or bool in types)
        if value is not default and not fits:
            raise ConfigError(
                "config/wrong-type", f"{self.where}: {self._name(key)} must be {kind}, but is {_shown(value)}"
            )
        return value

    def _name(self, key: builtins.str) -> builtins.str:
        return self._prefix + key


def _shown(value: object) -> str:
    """A config value in an error, as JSON spells it and never long."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, tuple):
        return "a list"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
