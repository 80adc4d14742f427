"""Proofs: small worlds that can be enumerated, and the oracle that says what a KL term is and does in them."""

from klamp.verify.oracle import Match, Report, examine
from klamp.verify.tabular import Chain, Outcomes, one_position, random_chain

__all__ = ["Chain", "Match", "Outcomes", "Report", "examine", "one_position", "random_chain"]
