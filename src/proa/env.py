"""The only reader of os.environ. Owns the table of variables that are no settings; config/ owns the settings' twins.

Only the outermost callers (cli, llm) read this; directories and switches then travel as arguments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from proa.errors import ConfigError

PREFIX = "PROA_"
# Not ours, but they govern the threads that all kernels share; `proa doctor` shows those that are set.
OPENMP_NAMES = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "OMP_PLACES", "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT", "GOMP_CPU_AFFINITY", "MKL_NUM_THREADS",
)  # fmt: skip
SPIN_NAME = "GOMP_SPINCOUNT"
SPINS = "1000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable that is not a setting of the engine, hence has no flag twin in config/fields.py."""

    name: str
    help: str
    default: str


CACHE_DIR = Variable(
    name="PROA_CACHE_DIR",
    help="where fetched recipes, compiled kernels and self-test verdicts are kept",
    default="$XDG_CACHE_HOME/proa, else ~/.cache/proa",
)
CONFIG = Variable(name="PROA_CONFIG", help="the settings file to read where `--config` is not given", default="none")
DEBUG = Variable(name="PROA_DEBUG", help="1: print a traceback with every error, as `--debug` does", default="0")
OFFLINE = Variable(
    name="PROA_OFFLINE", help="1: never use the network; a file that is not here is an error", default="0"
)
# Read by the test suite alone; listed because an unknown PROA_ name is an error.
ORACLES = Variable(name="PROA_ORACLES", help="for tests: the directory of reference checkpoints", default="none")
TEST_GGUF = Variable(name="PROA_TEST_GGUF", help="for tests: the real model's file", default="as fetched")
TEST_ISA = Variable(
    name="PROA_TEST_ISA",
    help="for tests: the CPU flags, with spaces, to compile native kernels for",
    default="this CPU's",
)
VARIABLES = (CACHE_DIR, CONFIG, DEBUG, OFFLINE, ORACLES, TEST_GGUF, TEST_ISA)

_SWITCH_WORDS = (("1", True), ("true", True), ("yes", True), ("on", True),
                 ("0", False), ("false", False), ("no", False), ("off", False))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says. `variables` holds every PROA_ name that is set and not empty, known or not; `openmp`
    those of OPENMP_NAMES that are set."""

    variables: Mapping[str, str]
    openmp: Mapping[str, str]
    debug: bool
    offline: bool
    xdg_cache_home: str

    @property
    def cache_dir(self) -> Path:
        """The cache directory, absolute, not created. Raises ConfigError where no home directory is known either."""
        asked = self.variables.get(CACHE_DIR.name, "")
        try:
            if asked:
                return Path(asked).expanduser().absolute()
            # The XDG specification says to ignore a relative path.
            base = Path(self.xdg_cache_home)
            return (base if base.is_absolute() else Path.home() / ".cache") / "proa"
        except RuntimeError as error:
            raise ConfigError(
                "config/no-cache-dir",
                f"no directory for the cache: {error}",
                hint=f"set {CACHE_DIR.name} to a directory that you own",
            ) from error


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the process environment, or `environ` in its place."""
    source = os.environ if environ is None else environ
    variables = {name: value for name, value in source.items() if name.startswith(PREFIX) and value}
    return Environment(
        variables=variables,
        openmp={name: source[name] for name in OPENMP_NAMES if name in source},
        debug=_switch(variables, DEBUG),
        offline=_switch(variables, OFFLINE),
        xdg_cache_home=source.get("XDG_CACHE_HOME", ""),
    )


def shorten_waits(environ: MutableMapping[str, str] | None = None) -> None:
    """Let OpenMP threads spin only briefly at a barrier, unless the environment says how they wait.

    For a process of our own, before torch is loaded: libgomp reads this once.
    """
    # Decoding SmolLM2 on 2 threads of 2 cores, tok/s. Cores to itself: 177-204 by default, 180-202 with 1000, 71-101
    # passive. Beside one busy process: 42-48 or stuck for a minute, 48, 92: a wait spins while the other thread is due.
    # 1000 (about 40 us, what a wake-up costs) is also libgomp's own count where threads outnumber cores. All figures,
    # also those against it: docs/kernels.md.
    target = os.environ if environ is None else environ
    if SPIN_NAME not in target and "OMP_WAIT_POLICY" not in target:
        target[SPIN_NAME] = SPINS


def _switch(variables: Mapping[str, str], variable: Variable) -> bool:
    text = variables.get(variable.name, variable.default)
    for word, meaning in _SWITCH_WORDS:
        if text.lower() == word:
            return meaning
    raise ConfigError(
        "config/bad-value",
        f"{variable.name} = {text!r} is not a switch.",
        facts=["can be: " + ", ".join(word for word, _ in _SWITCH_WORDS)],
    )
