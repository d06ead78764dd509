"""Host facts: the value, its JSON both ways, and the readers shown other machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.errors import ConfigError
from proa.kernels import host
from proa.kernels.caps import caps_from_json, caps_to_json, read_caps, read_caps_file
from proa.kernels.nvml import Gpu
from tests.factories.headers import GPU_HOST, LAPTOP


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       16000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n"


@pytest.mark.parametrize("caps", [LAPTOP, GPU_HOST, replace(LAPTOP, memory_available=None, compiler=None)])
def test_json_gives_the_same_value_back(caps: Any) -> None:
    assert caps_from_json(json.loads(json.dumps(caps_to_json(caps))), where="x") == caps


def test_the_least_file_names_device_isa_cores_and_memory() -> None:
    least = {"device": "cpu", "isa": ["avx2"], "cores": 8, "memory_bytes": 2**34}
    caps = caps_from_json(least, where="x")
    assert (caps.cores, caps.compiler, caps.memory_available, dict(caps.kernels)) == (8, None, None, {})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cores": 0}, "cores must be a positive whole number"),
        ({"cores": True}, "cores must be"),
        ({"memory_bytes": "16GiB"}, "memory_bytes must be"),
        ({"device": "a tpu"}, "device must be"),
        ({"isa": "avx2"}, "isa must be a list"),
        ({"kernels": {"native": 1}}, "kernels must be"),
        ({"gpus": [{"name": "x"}]}, "gpus must be"),
        ({"memory_available": -1}, "memory_available must be"),
        ({"cuda_version": "thirteen"}, "cuda_version must be"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_a_wrong_file_is_refused_naming_file_and_key(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "caps.json"
    path.write_text(json.dumps(caps_to_json(LAPTOP) | change))
    with pytest.raises(ConfigError, match=says) as caught:
        read_caps_file(path)
    assert caught.value.slug == "config/caps" and str(path) in str(caught.value)


@pytest.mark.parametrize("missing", ["device", "isa", "cores", "memory_bytes"])
def test_a_missing_fact_is_named(missing: str) -> None:
    values = {key: value for key, value in caps_to_json(LAPTOP).items() if key != missing}
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        caps_from_json(values, where="x")


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not JSON"), ("[]", "must hold a JSON object"), (None, "not readable")]
)
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "caps.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_caps_file(path)


def test_isa_flags_are_those_that_kernels_ask_for(tmp_path: Path) -> None:
    x86 = machine(tmp_path / "x", {"proc/cpuinfo": "processor: 0\nflags\t\t: fpu avx2 fma sse avx512f\n"})
    arm = machine(tmp_path / "a", {"proc/cpuinfo": "processor: 0\nFeatures\t: fp asimd i8mm bf16\n"})
    assert host.isa_flags(x86) == ("avx2", "fma", "avx512f")
    assert host.isa_flags(arm) == ("asimd", "bf16", "i8mm")
    assert len(host.isa_flags(tmp_path / "nothing")) == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinity exists on Linux only")
def test_cores_respect_the_affinity_mask(tmp_path: Path) -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from pathlib import Path; from proa.kernels import host; print(host.usable_cores(Path('/nowhere')))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=with_sources())
    assert ran.stdout.strip() == "1"


def with_sources() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(host.__file__).parents[2])}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, 64),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            64,
        ),
        ({}, 64),
    ],
)
def test_cores_respect_the_tightest_cpu_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert host.usable_cores(machine(tmp_path, files)) == cores


def test_memory_is_the_hosts_without_a_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/j", "sys/fs/cgroup/j/memory.max": "max"}
    )
    assert host.memory(root) == host.Memory(total=16000 * 1024, available=8000 * 1024)


def test_memory_respects_the_control_group_and_counts_its_cache_as_free(tmp_path: Path) -> None:
    group = {
        "memory.max": "4096000\n", "memory.current": "3000000\n",
        "memory.stat": "anon 1\ninactive_file 1000000\nactive_file 5\n",
    }  # fmt: skip
    root = machine(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n"})
    machine(root / "sys/fs/cgroup/a", group)
    assert host.memory(root) == host.Memory(total=4096000, available=4096000 - 2000000)


def test_memory_respects_the_old_control_group_too(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "7:memory:/j\n"})
    machine(
        root / "sys/fs/cgroup/memory/j",
        {
            "memory.limit_in_bytes": "1000000",
            "memory.usage_in_bytes": "400000",
            "memory.stat": "total_inactive_file 0\n",
        },
    )
    assert host.memory(root) == host.Memory(total=1000000, available=600000)


def test_memory_without_proc_is_the_physical_one(tmp_path: Path) -> None:
    found = host.memory(tmp_path)
    assert found.total > 2**20 and found.available is None


GPU = Gpu(name="NVIDIA H200", memory_bytes=1, memory_free=1, sm="9.0")


@pytest.mark.parametrize(
    ("gpus", "torch", "says"),
    [
        ((), "2.9.0+cu129", "no CUDA device or driver"),
        ((GPU,), "2.9.0+cpu", "is the CPU build"),
        ((GPU,), None, "torch is not installed"),
        ((GPU,), "2.9.0+cu129", None),
        ((GPU,), "2.9.0", None),
    ],
)
def test_cuda_needs_a_driver_with_a_device_and_a_torch_for_it(
    gpus: tuple[Gpu, ...], torch: str | None, says: str | None
) -> None:
    found = host.why_no_cuda(gpus, torch)
    assert found is None if says is None else says in str(found)


def test_this_host_can_be_read_and_written_down() -> None:
    caps = read_caps("cpu")
    assert (caps.device, caps.gpus) == ("cpu", ()) and caps.cores >= 1 and caps.memory_bytes > 2**20
    assert caps_from_json(json.loads(json.dumps(caps_to_json(caps))), where="x") == caps
    assert caps.verdict("reference") == "untested"
    assert replace(caps, kernels={"reference": "passed"}).verdict("reference") == "passed"


@pytest.mark.parametrize(
    ("libraries", "version"),
    [
        ({"torch": "2.13.0+cu130"}, "13.0"),
        ({"torch": "2.9.1+cu128", "nvidia-cuda-runtime": "13.0.96"}, "12.8"),
        ({"torch": "2.13.0", "nvidia-cuda-runtime": "13.0.96"}, "13.0"),
        ({"torch": "2.9.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, "12.8"),
        ({"torch": "2.13.0+cpu"}, None),
        ({}, None),
    ],
)
def test_the_cuda_of_torch_is_in_its_version_or_in_the_runtime_beside_it(
    libraries: dict[str, str], version: str | None
) -> None:
    assert host.cuda_version(libraries) == version
