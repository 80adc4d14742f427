"""Imported for its effect: `klamp.verl.register()`, in whatever process imports it.

verl imports it in each of its processes where it is named in VERL_USE_EXTERNAL_MODULES.
"""

from klamp.verl import register

register()
