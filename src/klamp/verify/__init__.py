"""Proofs by enumeration: small language models whose every completion is listed, so that every mean is exact.

    examine, examine_config     any loss, any configuration: expected value and gradient against the truths
    verify_estimators           every claim about the estimators; verify_all: every claim that klamp makes
    explain_config              what a configuration does, in words; explain_form: what a document prints

`klamp.verify.judge` judges a KL function that somebody else wrote.
"""

from klamp.verify.explain import explain_config
from klamp.verify.judge import Explanation, explain_form
from klamp.verify.one_step import Scene, StepReport, examine_config, scene
from klamp.verify.oracle import Report, examine
from klamp.verify.proofs import Check, verify_all, verify_estimators
from klamp.verify.worlds import Chain, Outcomes, one_position, random_chain

__all__ = [
    "Chain",
    "Check",
    "Explanation",
    "Outcomes",
    "Report",
    "Scene",
    "StepReport",
    "examine",
    "examine_config",
    "explain_config",
    "explain_form",
    "one_position",
    "random_chain",
    "scene",
    "verify_all",
    "verify_estimators",
]
