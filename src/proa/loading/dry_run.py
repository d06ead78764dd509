"""What `inspect` says: the load ledger of each runner from headers alone, and the config keys that nobody reads.

The rules and the ledger are those of loading; no tensor data is read and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proa.loading.ledger import LoadLedger, ledger_document
from proa.plan.digest import plain
from proa.plan.planned import Resolved


def open_ledgers(resolved: Resolved) -> dict[str, LoadLedger]:
    """One ledger per runner, by role. They stay open: nothing was loaded."""
    return {planned.plan.role.value: LoadLedger(planned) for planned in resolved.runners}


def tensor_counts(resolved: Resolved) -> dict[str, str]:
    """One short phrase per role: `291 placed, 1 tied`."""
    phrases: dict[str, str] = {}
    for role, ledger in open_ledgers(resolved).items():
        counts = ledger.tensor_counts()
        said = [f"{counts[state]} {state.replace('_', ' ')}" for state in counts if state != "total" and counts[state]]
        phrases[role] = ", ".join(said) or "none"
    return phrases


def inspect(resolved: Resolved) -> dict[str, Any]:
    """interfaces.md's JSON, and beside it per runner `wrong` (tensors that refuse the load) and `config`."""
    return account(resolved, open_ledgers(resolved))


def account(resolved: Resolved, ledgers: Mapping[str, LoadLedger]) -> dict[str, Any]:
    """As `inspect`, from ledgers that are open already."""
    document = ledger_document(ledgers, [planned.checkpoint for planned in resolved.runners])
    for role, ledger in ledgers.items():
        config = resolved.configs[role]
        document["runners"][role] |= {
            "wrong": [
                {"kind": found.wrong.name.lower(), "name": found.name, "what": found.what, "nearest": list(found.near)}
                for found in ledger.findings
            ],
            "config": {"file": config.where, "unknown": plain(config.unknown), "notes": list(config.notes)},
        }
    return document
