"""Audits of other packages: where each installed trainer computes its KL, and the versions that this was tried with."""

from __future__ import annotations

from klamp.audit.hosts import HOSTS, Host, load_subject

__all__ = ["HOSTS", "Host", "load_subject"]
