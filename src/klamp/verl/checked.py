"""Imported for its effect: `klamp.verl.register(check=True)`, for VERL_USE_EXTERNAL_MODULES=klamp.verl.checked."""

from klamp.verl import register

register(check=True)
