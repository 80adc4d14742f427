"""Proofs: the enumeration oracle and the worlds that it enumerates."""
