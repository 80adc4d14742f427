"""What `klamp audit NAME` can audit: the hosts, where their KL is found, the versions that this was tried with."""

from __future__ import annotations

from klamp.audit.hosts import HOSTS, Host, load_subject

__all__ = ["HOSTS", "Host", "load_subject"]
