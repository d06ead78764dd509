"""`proa explain` as typed: what it prints, its exit codes, and that it starts fast because torch stays out."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from proa.cli.main import main
from proa.kernels.caps import caps_to_json
from tests.factories.checkpoints import tiny_config
from tests.factories.headers import GPU_HOST, write_headers, write_tiny_headers

SOURCES = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_headers(tmp_path_factory.mktemp("verb") / "llama", "llama")


def proa(*words: str | Path) -> int:
    return main([str(word) for word in words])


def test_it_prints_the_table_with_tensor_counts(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert proa("explain", llama, "--draft", llama) == 0
    out = capsys.readouterr().out
    assert "attention.verify" in out and "standalone" in out
    assert "tensors" in out and out.count("30 placed") == 2


def test_it_prints_json_alone_on_stdout(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert proa("explain", llama, "--json") == 0
    assert json.loads(capsys.readouterr().out)["runners"]["target"]["family"] == "llama"


def test_why_prints_conditions_and_an_unknown_knob_exits_with_2(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert proa("explain", llama, "--why", "matmul_kernel") == 0
    assert "kernel.native.isa" in capsys.readouterr().out
    assert proa("explain", llama, "--why", "matmul_kernel", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["knob"] == "matmul_kernel"
    assert proa("explain", llama, "--why", "nothing") == 2
    assert "plan/unknown-knob" in capsys.readouterr().err


def test_a_kernel_that_cannot_run_exits_with_4_and_one_message(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert proa("explain", llama, "--attention.verify", "flashinfer") == 4
    err = capsys.readouterr().err
    assert err.startswith("KernelUnavailable [plan/kernel-unavailable]: target: attention.verify = flashinfer")
    assert "Traceback" not in err


def test_caps_of_another_host_are_planned_for(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "h200.json"
    file.write_text(json.dumps(caps_to_json(GPU_HOST)))
    assert proa("explain", llama, "--caps", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["runners"]["target"]["decisions"]["device"]["value"] == "cuda"
    file.write_text("{}")
    assert proa("explain", llama, "--caps", file) == 2
    assert str(file) in capsys.readouterr().err


def test_families_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert proa("explain", "--families") == 0
    assert "MistralForCausalLM" in capsys.readouterr().out
    assert proa("explain", "--families", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"llama", "glm4_moe"} < {entry["family"] for entry in listed if "family" in entry}


def test_without_a_model_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert proa("explain") == 2
    assert "MODEL is missing" in capsys.readouterr().err


def test_diff_prints_what_differs(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert proa("explain", llama, "--draft", llama, "--draft.page-size", "4", "--diff") == 0
    assert "page_size" in capsys.readouterr().out


def test_an_unknown_config_key_is_warned_about_once_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_headers(tmp_path / "m", tiny_config("llama") | {"harmless_extra": 1})
    assert proa("explain", model) == 0
    seen = capsys.readouterr()
    assert seen.err.count("harmless_extra") == 1 and "harmless_extra" not in seen.out


@pytest.mark.parametrize("verb", ["explain", "inspect", "doctor"])
def test_it_starts_without_torch(llama: Path, verb: str) -> None:
    words = [verb] if verb == "doctor" else [verb, str(llama)]
    code = (
        f"import sys; from proa.cli.main import main; code = main({words!r});"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy', 'safetensors'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SOURCES)
    assert (ran.returncode, ran.stderr.strip()) == (0, "[]")


def test_it_answers_in_half_a_second(llama: Path) -> None:
    command = [sys.executable, "-m", "proa", "explain", str(llama)]
    best = min(_seconds(command) for _ in range(5))
    assert best < 0.5


def _seconds(command: list[str]) -> float:
    """Processor time: what else runs on the machine does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True, cwd=SOURCES)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
