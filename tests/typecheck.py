"""The run-time type checker that conftest.py puts on the core."""

from beartype import BeartypeConf, beartype

# is_pep484_tower: an int is welcome where a float is asked for, as in every type checker that reads the source.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
