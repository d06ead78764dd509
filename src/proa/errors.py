"""Every error that a user can meet, in one house form. Owns wording shape and exit codes; owns no checks.

ProaError
├── ConfigError        a flag, a file key, an environment variable or a config.json value        exit 2
├── RequestError       a request (prompt, sampling parameter) that cannot be served              exit 2
├── CheckpointError    a file of a checkpoint is missing, damaged or of an unknown form          exit 3
├── WeightError        tensors and parameters do not match one to one                            exit 3
├── PlanError          what was asked cannot be planned                                          exit 2
│   └── KernelUnavailable  a kernel or device that was asked for cannot run on this host         exit 4
├── CacheExhausted     not enough memory or pages on this host                                   exit 4
└── CheckFailed        `proa check` found a pair unhealthy or not lossless                       exit 5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class ProaError(Exception):
    """`Class [slug]: role: message`, then fact lines, then what to type next.

    The slug is stable and has an entry in docs/errors.md. `role` names the runner concerned
    (`target`, `draft`) where there is one.
    """

    exit_code: ClassVar[int] = 2

    def __init__(
        self, slug: str, message: str, *, role: str | None = None, facts: Sequence[str] = (), hint: str | None = None
    ) -> None:
        self.slug = slug
        self.message = message
        self.role = role
        self.facts = tuple(facts)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f"{self.role}: " if self.role else ""
        lines = [f"{type(self).__name__} [{self.slug}]: {where}{self.message}"]
        lines += [f"  {fact}" for fact in self.facts]
        if self.hint:
            lines.append(f"  Next: {self.hint}")
        return "\n".join(lines)


class ConfigError(ProaError):
    exit_code = 2


class RequestError(ProaError):
    exit_code = 2


class CheckpointError(ProaError):
    exit_code = 3


class WeightError(ProaError):
    exit_code = 3


class PlanError(ProaError):
    exit_code = 2


class KernelUnavailable(PlanError):
    exit_code = 4


class CacheExhausted(ProaError):
    exit_code = 4


class CheckFailed(ProaError):
    exit_code = 5
