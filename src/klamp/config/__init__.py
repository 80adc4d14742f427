"""The one configuration that every trainer takes."""

from klamp.config.kl import ALIASES, KLConfig
from klamp.config.loss import LOSS_TYPES, TRL_LOSS_TYPES, LossConfig, build_objective
from klamp.config.presets import PRESETS, Preset, find_preset, preset
from klamp.config.teacher import TEACHER_ALIASES, TeacherConfig
from klamp.errors import KLWarning

__all__ = [
    "ALIASES",
    "LOSS_TYPES",
    "PRESETS",
    "TEACHER_ALIASES",
    "TRL_LOSS_TYPES",
    "KLConfig",
    "KLWarning",
    "LossConfig",
    "Preset",
    "TeacherConfig",
    "build_objective",
    "find_preset",
    "preset",
]
