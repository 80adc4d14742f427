"""klamp's KL on TRL's trainer as Unsloth rewrites it: `attach` it, and ask what is in force.

    import unsloth  # first, as always
    from klamp.unsloth import attach, effective

Needs unsloth>=2026.10.7 (tried up to 2026.10.9), which is checked when klamp is attached.
"""

from klamp.trl import Effective, EffectiveTerm, attach, effective

__all__ = ["Effective", "EffectiveTerm", "attach", "effective"]
