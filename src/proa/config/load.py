"""From what was asked to the intent: file < environment < flags < API. Owns precedence, origins and their errors."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from proa.choice import Choice, Origin, OriginSource
from proa.config.fields import KEYS, Key, flag_name, nearest, python_name, variable_name
from proa.config.intent import EngineConfig
from proa.env import CONFIG, PREFIX, VARIABLES
from proa.errors import ConfigError

_THE_MODEL = ("model", "target.path")
_MODEL_ARGUMENT = Origin(source=OriginSource.API, where="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One value as a source holds it. `origin.where` is the spelling that errors name."""

    key: Key
    raw: object
    origin: Origin


def load_config(
    model: str,
    *,
    flags: Mapping[str, str | list[str]],
    file: Path | None,
    environ: Mapping[str, str],
    api: Mapping[str, object],
    model_origin: Origin = _MODEL_ARGUMENT,
) -> EngineConfig:
    """Merge every source into the intent. Raises ConfigError that names the flag, file and key, variable or argument.

    Each source is first expanded on its own to leaves: within one source, naming the runner beats naming none, then
    naming the phase beats the base setting, whatever the order; a flag typed twice counts once, the last. Then a later
    source replaces an earlier one leaf by leaf. So `--dtype X` is exactly `--target.dtype X --draft.dtype X`: it also
    replaces a `draft.dtype` of the file, as one who types it expects. Lists are replaced too, never joined. `auto` is
    a value like any other: it leaves the leaf to the engine again and is remembered with its origin.

    `flags` maps flags as typed (`--draft.kv-dtype`) to their text. `api` holds Python names, flat or nested; None means
    "not asked". Without `file`, the one that PROA_CONFIG names is read.
    """
    if file is None and environ.get(CONFIG.name):
        file = Path(environ[CONFIG.name])
    leaves: dict[str, Choice[Any]] = {"target.path": Choice(value=model, origin=model_origin)}
    for asked in (_from_file(file), _from_environ(environ), _from_flags(flags), _from_api(api)):
        leaves.update(_expand(asked))
    return _build(model, leaves)


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a PROA_ name that nothing reads: a misspelt one must not pass for the default."""
    for _ in _from_environ(environ):
        pass


def _build(model: str, leaves: Mapping[str, Choice[Any]]) -> EngineConfig:
    sections: dict[str, dict[str, Choice[Any]]] = {}
    for path, leaf in leaves.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = leaf
    config = EngineConfig(model=model)
    return replace(config, **{name: replace(getattr(config, name), **part) for name, part in sections.items()})


def _expand(asked: Iterable[_Asked]) -> dict[str, Choice[Any]]:
    """One source as leaves."""
    by_key: dict[str, _Asked] = {}
    for one in asked:
        twin = by_key.setdefault(one.key.dotted, one)
        if twin is not one:
            raise ConfigError(
                "config/duplicate-key",
                f"{twin.origin.where} and {one.origin.where} are one setting.",
                hint="keep one of them",
            )
    leaves: dict[str, Choice[Any]] = {}
    for one in sorted(by_key.values(), key=lambda one: one.key.specificity):
        leaves.update(dict.fromkeys(one.key.leaves, _choice(one)))
    return leaves


def _choice(asked: _Asked) -> Choice[Any]:
    kind = asked.key.field.kind
    origin = replace(asked.origin, is_base=len(asked.key.field.leaves) > 1)
    if asked.raw == "auto" or (asked.key.field.is_repeatable and asked.raw == ["auto"]):
        return Choice(value=None, origin=origin)
    try:
        return Choice(value=kind.parse(asked.raw), origin=origin)
    except ValueError as error:
        words = ("auto", *kind.choices)
        raise ConfigError(
            "config/bad-value",
            f"{asked.origin.where} = {asked.raw!r}: {error}.",
            role=asked.key.role.value if asked.key.role else None,
            facts=["can be: " + ", ".join(words)] if kind.choices else (),
            hint=nearest(str(asked.raw), words),
        ) from error


def _index(spell: Callable[[str], str]) -> dict[str, Key]:
    """Every setting by every name that it has in one source."""
    return {spell(spelling): key for key in KEYS for spelling in key.spellings}


def _from_file(file: Path | None) -> Iterator[_Asked]:
    if file is None:
        return
    index = _index(str)
    for name, raw in _flatten(_read_toml(file)):
        where = f"{file}: {name}"
        if name not in index:
            raise ConfigError("config/unknown-key", f"unknown key {where}.", hint=_hint(name, index))
        yield _Asked(key=index[name], raw=raw, origin=Origin(source=OriginSource.FILE, where=where))


def _from_environ(environ: Mapping[str, str]) -> Iterator[_Asked]:
    """Variables that are set but empty count as not set, so that `PROA_DTYPE= proa …` switches one off."""
    index = _index(variable_name)
    others = [variable.name for variable in VARIABLES]
    for name, raw in environ.items():
        if not name.startswith(PREFIX) or not raw or name in others:
            continue
        if name not in index:
            raise ConfigError(
                "config/unknown-variable", f"unknown variable {name}.", hint=_hint(name, [*index, *others])
            )
        yield _Asked(key=index[name], raw=raw, origin=Origin(source=OriginSource.ENV, where=name))


def _from_flags(flags: Mapping[str, str | list[str]]) -> Iterator[_Asked]:
    index = _index(flag_name)
    for typed, raw in flags.items():
        name = "--" + typed.lstrip("-")
        if name not in index:
            raise ConfigError("config/unknown-flag", f"unknown flag {name}.", hint=_hint(name, index))
        key = index[name]
        value = raw[-1] if isinstance(raw, list) and not key.field.is_repeatable else raw
        yield _Asked(key=key, raw=value, origin=Origin(source=OriginSource.FLAG, where=name))


def _from_api(api: Mapping[str, object]) -> Iterator[_Asked]:
    """Nested (`draft={"kv_dtype": …}`) and flat (`draft_kv_dtype=…`) names, also mixed."""
    index = _index(python_name)
    for name, raw in _flatten(api):
        if python_name(name) not in index:
            raise ConfigError(
                "config/unknown-argument", f"unknown argument {name}.", hint=_hint(python_name(name), index)
            )
        if raw is not None:
            origin = Origin(source=OriginSource.API, where=name)
            yield _Asked(key=index[python_name(name)], raw=raw, origin=origin)


def _flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(cast("Mapping[str, object]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(cast("Sequence[object]", value)) if isinstance(value, tuple) else value


def _hint(name: str, known: Iterable[str]) -> str | None:
    bare = name.removeprefix("--").removeprefix(PREFIX).lower().replace("__", ".").replace("_", ".")
    if bare in _THE_MODEL:
        return "the target is the MODEL argument; only the draft has a path among the settings"
    return nearest(name, known)


def _read_toml(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config/file", f"cannot read {file}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config/file", f"{file} is not TOML: {error}.") from error
