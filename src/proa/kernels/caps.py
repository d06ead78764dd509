"""What this machine can: one value, read without torch, written and read as JSON. Owns no choice of kernels.

`explain --caps FILE` plans for another machine because the plan sees nothing of a host but this value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from proa.errors import ConfigError
from proa.kernels import host
from proa.kernels.nvml import Gpu

UNTESTED = "untested"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCaps:
    """Static facts and self-test verdicts of one host.

    `device` is the best device that can be used: "cpu", "cuda", or one that an installed kernel package serves
    (kernels/plugins.py); `cores` respects affinity and CPU quota;
    `memory_bytes` is host memory within its limit, `memory_available` what of it is free now (None: unknown).
    `gpus` are the CUDA devices that the driver lists, usable or not; `no_cuda` says why they are not usable;
    `cuda_version` is the one that torch was built for (None: unknown).
    `kernels` maps a backend, or a part of one, to `passed` or `failed: why`; one that is absent is untested.
    """

    device: str
    isa: tuple[str, ...]
    cores: int
    memory_bytes: int
    compiler: str | None
    libraries: Mapping[str, str]
    kernels: Mapping[str, str]
    memory_available: int | None = None
    gpus: tuple[Gpu, ...] = ()
    no_cuda: str | None = None
    cuda_version: str | None = None
    platform: str = ""

    @property
    def sm(self) -> str | None:
        """Compute capability of the CUDA device that runs (`9.0`)."""
        return self.gpus[0].sm if self.device == "cuda" and self.gpus else None

    def verdict(self, backend: str) -> str:
        return self.kernels.get(backend, UNTESTED)


def read_caps(device: str = "auto", root: Path = Path("/")) -> DeviceCaps:
    """The facts of this host. `device` "cpu" or "meta" skips the look for GPUs; `root` is where /proc and /sys lie."""
    libraries = host.library_versions()
    gpus = host.cuda_devices() if device in ("auto", "cuda") else ()
    no_cuda = host.why_no_cuda(gpus, libraries.get("torch"))
    memory = host.memory(root)
    return DeviceCaps(
        device="cpu" if no_cuda else "cuda",
        isa=host.isa_flags(root),
        cores=host.usable_cores(root),
        memory_bytes=memory.total,
        compiler=host.compiler(),
        libraries=MappingProxyType(libraries),
        kernels=MappingProxyType({}),
        memory_available=memory.available,
        gpus=gpus,
        no_cuda=no_cuda,
        cuda_version=host.cuda_version(libraries),
        platform=host.platform_name(),
    )


def caps_to_json(caps: DeviceCaps) -> dict[str, Any]:
    """A JSON object that `caps_from_json` reads back to an equal value."""
    values = {entry.name: getattr(caps, entry.name) for entry in fields(caps)}
    values |= {"isa": list(caps.isa), "gpus": [asdict(gpu) for gpu in caps.gpus]}
    values |= {"libraries": dict(caps.libraries), "kernels": dict(caps.kernels)}
    return values


def read_caps_file(path: Path) -> DeviceCaps:
    """Raises ConfigError `config/caps` naming the file and what is wrong with it."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError("config/caps", f"{path}: not readable: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("config/caps", f"{path}: not JSON: {error}") from error
    return caps_from_json(data, where=str(path))


def caps_from_json(data: object, *, where: str) -> DeviceCaps:
    """The value that `caps_to_json` wrote, alone or within the output of `proa doctor --json`.

    Raises ConfigError `config/caps` naming `where` and the key.
    """
    if not isinstance(data, Mapping):
        raise ConfigError("config/caps", f"{where}: must hold a JSON object (see `proa doctor --json`)")
    given = cast("Mapping[str, Any]", data)
    given = given.get("caps", given)  # as `proa doctor --json` prints it, beside its verdicts
    known = {entry.name: entry for entry in fields(DeviceCaps)}
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError("config/caps", f"{where}: unknown key {unknown[0]!r}", facts=(f"known: {', '.join(known)}",))
    missing = [name for name in _REQUIRED if name not in given]
    if missing:
        raise ConfigError("config/caps", f"{where}: {missing[0]} is missing")
    values: dict[str, Any] = {}
    for name, value in given.items():
        wanted, fits = _FORMS[name]
        if not fits(value):
            raise ConfigError("config/caps", f"{where}: {name} must be {wanted}, but is {json.dumps(value)[:80]}")
        values[name] = _FROZEN.get(name, _same)(value)
    return DeviceCaps(**{"compiler": None, "libraries": _EMPTY, "kernels": _EMPTY, **values})


def _same(value: Any) -> Any:
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_null(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_version_or_null(value: Any) -> bool:
    return value is None or (_is_text(value) and all(part.isdecimal() for part in value.split(".")))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(item, str) for item in cast("Mapping[str, Any]", value).values()
    )


def _is_gpu(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    gpu = cast("Mapping[str, Any]", value)
    counts = _is_count(gpu.get("memory_bytes")) and isinstance(gpu.get("memory_free"), int)
    return (
        set(gpu) == {"name", "memory_bytes", "memory_free", "sm"}
        and counts
        and _is_text(gpu["name"])
        and _is_text(gpu["sm"])
    )


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, cast("list[Any]", value)))


def _gpus(value: Any) -> tuple[Gpu, ...]:
    return tuple(Gpu(**gpu) for gpu in value)


_EMPTY: Mapping[str, str] = MappingProxyType({})
_REQUIRED = ("device", "isa", "cores", "memory_bytes")
_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "device": ("a device's name", lambda value: _is_text(value) and value.isidentifier()),
        "isa": ("a list of flags", _list_of(_is_text)),
        "cores": ("a positive whole number", _is_count),
        "memory_bytes": ("a positive whole number of bytes", _is_count),
        "memory_available": ("a whole number of bytes or null", lambda value: value in (None, 0) or _is_count(value)),
        "compiler": ("a path or null", _is_text_or_null),
        "libraries": ("an object of name: version", _is_table),
        "kernels": ("an object of backend: verdict", _is_table),
        "gpus": ("a list of {name, memory_bytes, memory_free, sm}", _list_of(_is_gpu)),
        "no_cuda": ("text or null", _is_text_or_null),
        "cuda_version": ("a version or null", _is_version_or_null),
        "platform": ("text", _is_text),
    }
)
_FROZEN: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {"isa": tuple, "gpus": _gpus, "libraries": MappingProxyType, "kernels": MappingProxyType}
)
