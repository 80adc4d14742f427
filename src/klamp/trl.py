"""TRL's GRPO with klamp's KL: `GRPOConfig` and `GRPOTrainer` take the place of the classes of the same name.

    from klamp.trl import GRPOConfig, GRPOTrainer

Needs trl>=1.10,<2; another version raises UnsupportedVersion on import.
"""

from __future__ import annotations

from klamp.adapters.trl.versions import check_version

check_version()

from klamp.adapters.trl.config import GRPOConfig  # noqa: E402  (the version is checked before TRL is opened up)
from klamp.adapters.trl.effective import Effective, effective  # noqa: E402
from klamp.adapters.trl.trainer import GRPOTrainer, attach  # noqa: E402

__all__ = ["Effective", "GRPOConfig", "GRPOTrainer", "attach", "effective"]
