"""klamp's KL in verl: names for its configuration, and the functions behind them.

    register      klamp's names mean something in this process; `import klamp.verl.registered` does it
    overrides     a KLConfig as overrides of verl's configuration
    effective     what the KL of a verl configuration will really do
    Driver        klamp's part in verl's trainer, for what needs a whole batch; `overrides` names it where it is needed

Needs verl>=0.9.1 (tried up to 0.9) where it trains; `overrides` and `effective` do without.
"""

from klamp.hosts.common.effective import Effective, EffectiveTerm
from klamp.hosts.verl.driver import Driver
from klamp.hosts.verl.effective_in_verl import effective
from klamp.hosts.verl.hooks import register
from klamp.hosts.verl.overrides import overrides

__all__ = ["Driver", "Effective", "EffectiveTerm", "effective", "overrides", "register"]
