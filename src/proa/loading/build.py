"""From a planned runner to a model with filled weights and a closed ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proa.checkpoint.open import require_data
from proa.dist.mesh import SINGLE
from proa.kernels.bind import bind
from proa.kernels.plugins import KernelPlugin
from proa.layers.base import BuildContext, kernel_names
from proa.layers.decoder import Decoder
from proa.layers.finishing import Finishing
from proa.loading.apply import load_weights
from proa.loading.ledger import LoadLedger
from proa.loading.progress import Progress
from proa.loading.self_check import check_fused_layers
from proa.loading.tables import bounds, check_tables
from proa.plan.planned import Planned


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    model: Decoder
    ledger: LoadLedger


def construct(
    planned: Planned, library: Path | None, lender: Decoder | None, plugins: Sequence[KernelPlugin] = ()
) -> Decoder:
    """The model with unfilled parameters, on the plan's device (`meta` costs nothing) and with kernels of its own.

    `lender` is the built target of a draft that borrows modules of it, `plugins` what the plan was resolved with.
    """
    context = BuildContext(
        plan=planned.plan,
        table=planned.parameters,
        mesh=SINGLE,
        kernels=bind(kernel_names(planned.plan, planned.spec), library, plugins),
        prefix="",
        lender=lender,
    )
    return Decoder(context, planned.spec).eval()


def build(
    planned: Planned,
    progress: Progress,
    library: Path | None,
    target: Decoder | None,
    plugins: Sequence[KernelPlugin] = (),
) -> BuiltModel:
    """Load one runner. Refuses (WeightError, exit 3) before reading any data when headers show that it cannot fit.

    `library` is the compiled file of the native kernels, where the plan names them; `target` is the built model that a
    draft may borrow modules of. A model whose fused experts do not compute what the checkpoint means is refused, too,
    and one whose tables name experts that there are not.
    """
    ledger = LoadLedger(planned)
    ledger.refuse_forms()
    ledger.refuse_findings()
    require_data(planned.checkpoint)
    model = construct(planned, library, target, plugins)
    finishing = Finishing(model, model.kernels, planned.parameters)
    tables = {name: finishing.parameters[name] for name in bounds(planned)}
    load_weights(finishing.parameters, ledger, progress, finishing.filled)
    ledger.close()
    check_tables(planned, tables)
    finishing.rest()
    check_fused_layers(planned, model)
    return BuiltModel(model=model, ledger=ledger)
