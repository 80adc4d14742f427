"""klamp's KL in verl: names for its configuration, and the functions behind them.

    register      klamp's names mean something in this process; `import klamp.verl.registered` does it
    overrides     a KLConfig as overrides of verl's configuration
    effective     what the KL of a verl configuration will really do

Needs verl>=0.8,<0.10 where it trains; `overrides` and `effective` do without.
"""

from klamp.hosts.common.effective import Effective, EffectiveTerm
from klamp.hosts.verl.effective import effective
from klamp.hosts.verl.hooks import register
from klamp.hosts.verl.overrides import overrides

__all__ = ["Effective", "EffectiveTerm", "effective", "overrides", "register"]
