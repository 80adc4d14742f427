"""The tests against real trainers: each folder needs the package of its name, and is not there without it."""

from importlib.util import find_spec

HOSTS = ("deepspeed", "unsloth", "verifiers", "verl", "vllm")
collect_ignore = [package for package in HOSTS if find_spec(package) is None]
