"""Every setting of a fine-tuning run with its bounds and default; imports the standard library only.

The settings classes of the shipped defenses are exported for direct use; `defenses()` has those of other packages too.
"""

from __future__ import annotations

from spard.config.anchors import PLAIN, Anchors
from spard.config.bounds import Auto, Bound
from spard.config.checks import (
    MIN_SCORED,
    ON_FIGURES,
    AuditEngine,
    Evidence,
    FurtherTuning,
    GateThresholds,
    HeldOutRowsLimit,
    ProbeSteps,
    RowAction,
    RowSignal,
)
from spard.config.defenses import Defense, customer_defenses, defenses
from spard.config.defenses.lisa import Lisa
from spard.config.defenses.none import NoDefense
from spard.config.defenses.ptst import Ptst
from spard.config.defenses.safegrad import SafeGrad
from spard.config.defenses.safeinstr import SafeInstr
from spard.config.defenses.safelora import SafeLora
from spard.config.defenses.spard import Spard, Variant
from spard.config.quantization import Quantization, Quantizes
from spard.config.settings import (
    AUDITS,
    DISGUISES_ALONE,
    MAX_SEQ_LENGTH,
    Agent,
    Asking,
    Audit,
    AuditSize,
    Beta,
    Dpo,
    Ending,
    Hyperparameters,
    JudgeSpec,
    Lora,
    OptimizerName,
    Recipe,
    ResolvedNumbers,
    Seed,
    Selection,
    SeqLength,
    Sharding,
    auto_multiplier,
    default_learning_rate,
    max_anchor_ratio,
    resolve,
)

__all__ = [
    "AUDITS",
    "DISGUISES_ALONE",
    "MAX_SEQ_LENGTH",
    "MIN_SCORED",
    "ON_FIGURES",
    "PLAIN",
    "Agent",
    "Anchors",
    "Asking",
    "Audit",
    "AuditEngine",
    "AuditSize",
    "Auto",
    "Beta",
    "Bound",
    "Defense",
    "Dpo",
    "Ending",
    "Evidence",
    "FurtherTuning",
    "GateThresholds",
    "HeldOutRowsLimit",
    "Hyperparameters",
    "JudgeSpec",
    "Lisa",
    "Lora",
    "NoDefense",
    "OptimizerName",
    "ProbeSteps",
    "Ptst",
    "Quantization",
    "Quantizes",
    "Recipe",
    "ResolvedNumbers",
    "RowAction",
    "RowSignal",
    "SafeGrad",
    "SafeInstr",
    "SafeLora",
    "Seed",
    "Selection",
    "SeqLength",
    "Sharding",
    "Spard",
    "Variant",
    "auto_multiplier",
    "customer_defenses",
    "default_learning_rate",
    "defenses",
    "max_anchor_ratio",
    "resolve",
]
