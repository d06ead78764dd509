"""`proa VERB`: dispatch, exit codes, and one message in the house form. The verbs here are stand-ins."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from proa.cli.main import VERBS, main
from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.errors import CacheExhausted, CheckFailed, ConfigError, KernelUnavailable, WeightError
from proa.units import DType

Run = Callable[[argparse.Namespace, EngineConfig | None, Output], int]
Install = Callable[[str, Run], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(verb, run)` puts a stand-in in the place of a verb's module."""
    for variable in ("PROA_DEBUG", "PROA_CONFIG"):
        monkeypatch.delenv(variable, raising=False)

    def put(verb: str, run: Run) -> None:
        module = ModuleType(f"proa.cli.{verb}")
        module.add_arguments = lambda parser: parser.add_argument("--own")  # type: ignore[attr-defined]  # stand-in
        module.run = run  # type: ignore[attr-defined]  # stand-in
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return put


def raising(error: BaseException) -> Run:
    def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
        raise error

    return run


def test_a_verb_gets_its_own_options_the_intent_and_the_writer(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineConfig] = []

    def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
        assert config is not None
        seen.append(config)
        out.line(f"{args.own} {args.json}")
        return 5

    install("explain", run)
    monkeypatch.setenv("PROA_DTYPE", "float32")
    assert main(["explain", "some/model", "--own", "x", "--draft.dtype", "bfloat16", "--json"]) == 5
    assert capsys.readouterr().out == "x True\n"
    assert seen[0].model == seen[0].target.path.value == "some/model"
    assert str(seen[0].target.path.origin) == "flag MODEL"
    assert seen[0].target.dtype.value is DType.F32
    assert seen[0].draft.dtype.value is DType.BF16


def test_a_verb_without_a_model_gets_no_intent_but_misspelt_variables_are_still_refused(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
        assert config is None
        return 0

    install("doctor", run)
    assert main(["doctor", "--json"]) == 0
    monkeypatch.setenv("PROA_CACHE_DIRS", "/x")
    assert main(["doctor"]) == 2
    assert "did you mean PROA_CACHE_DIR?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a/b", "wrong"), 2),
        (WeightError("a/b", "wrong"), 3),
        (KernelUnavailable("a/b", "wrong"), 4),
        (CacheExhausted("a/b", "wrong"), 4),
        (CheckFailed("a/b", "wrong"), 5),
        (KeyboardInterrupt(), 130),
        (ValueError("wrong"), 1),
    ],
)
def test_each_error_has_its_exit_code_and_one_message_on_stderr(
    error: BaseException, code: int, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("explain", raising(error))
    assert main(["explain", "m"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") <= 2
    if code not in (1, 130):
        assert captured.err == f"{type(error).__name__} [a/b]: wrong\n"
    if code == 1:
        assert captured.err.startswith("ProaError [internal/unexpected]: ValueError: wrong")


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_a_traceback_is_shown_only_when_asked_for(
    way: str, install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("explain", raising(ConfigError("a/b", "wrong")))
    if way == "environment":
        monkeypatch.setenv("PROA_DEBUG", "1")
    assert main(["explain", "m", *(["--debug"] if way == "flag" else [])]) == 2
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.endswith("ConfigError [a/b]: wrong\n")


def test_a_name_in_a_message_cannot_steer_the_terminal(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("explain", raising(WeightError("a/b", "tensor \x1b]0;owned\x07")))
    main(["explain", "m"])
    assert capsys.readouterr().err == "WeightError [a/b]: tensor \\x1b]0;owned\\x07\n"


@pytest.mark.parametrize(
    ("arguments", "slug", "says"),
    [
        (["serve", "m"], "config/verb-later", "`proa serve` is not in this version; it comes later"),
        (["explein", "m"], "config/unknown-verb", "did you mean explain?"),
        ([], "config/unknown-verb", "verbs: run, explain"),
        (["--dtype", "float32"], "config/unknown-verb", "'--dtype'"),
    ],
)
def test_a_verb_that_is_not_there_is_refused_in_the_house_form(
    arguments: list[str], slug: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"ConfigError [{slug}]: ")
    assert says in text


def test_help_and_version_are_results(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(f"  {verb.name} " in overview for verb in VERBS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("proa ")
    install("explain", raising(AssertionError()))
    assert main(["explain", "--help"]) == 0
    assert "--own" in capsys.readouterr().out


def test_dump_config_prints_the_merged_intent_and_runs_nothing(
    install: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install("explain", raising(AssertionError()))
    file = tmp_path / "run.toml"
    file.write_text('draft.path = "small"\nthreads = 2')
    assert main(["explain", "m", "--config", str(file), "--threads", "3", "--dump-config"]) == 0
    text = capsys.readouterr().out
    assert f'draft.path = "small"  # file {file}: draft.path' in text
    assert "threads = 3  # flag --threads" in text


ENDLESS = """
import sys
from types import ModuleType
from proa.cli.main import main
module = ModuleType("proa.cli.explain")
module.add_arguments = lambda parser: None
def run(args, config, out):
    while True:
        out.line("x" * 1000)
module.run = run
sys.modules[module.__name__] = module
sys.exit(main(["explain", "m"]))
"""


def test_a_reader_that_leaves_early_ends_the_command_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


HEAVY = ("torch", "rich", "numpy", "tokenizers", "huggingface_hub", "transformers")


@pytest.mark.parametrize("arguments", [["explain", "--help"], ["inspect", "--help"], ["--version"], ["--help"]])
def test_a_verb_that_reads_headers_starts_without_heavy_libraries(arguments: list[str]) -> None:
    code = f"import sys; from proa.cli.main import main; code = main({arguments!r}); print(code, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exit_code, *loaded = done.stdout.splitlines()[-1].split()
    assert exit_code == "0", done.stderr
    assert "proa.cli.main" in loaded
    assert set(loaded).isdisjoint(HEAVY)
