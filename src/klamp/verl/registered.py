"""Imported for its effect: `klamp.verl.register()`, for VERL_USE_EXTERNAL_MODULES=klamp.verl.registered."""

from klamp.verl import register

register()
