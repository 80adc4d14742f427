"""The section of alarms: what was seen, what it means, what to do, and which tokens are to blame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from klamp.doctor.alarm import Blamed
from klamp.doctor.alarms import ALARMS
from klamp.doctor.examine import AlarmFinding
from klamp.report.run import ReportRun, coverage, judged
from klamp.report.text import Html, element, join, plain_table, probability, shown
from klamp.report.tokens import NARROW, Shown, jump

FEW = 3
"""How many tokens to blame are shown of each run, where there are several runs."""
Anchors = Mapping[tuple[int, int, int], tuple[int, Shown]]
"""(run, step, completion) -> number of its card on the page, and what it shows."""


def anchors(completions: Sequence[Shown], numbers: Iterable[int]) -> Anchors:
    """The cards of the completions that alarms blame."""
    entries = ((number, completions[number]) for number in numbers)
    return {
        (entry.run, entry.completion.step, entry.index): (number, entry) for number, entry in entries if entry.blamed
    }


def raised(runs: Sequence[ReportRun]) -> dict[str, dict[int, AlarmFinding]]:
    """Alarm -> run -> finding, in the order of the runs and their steps, with all alarms before all notes."""
    findings: dict[str, dict[int, AlarmFinding]] = {}
    for number, run in enumerate(runs):
        for finding in run.diagnosis.findings:
            findings.setdefault(finding.alarm.name, {})[number] = finding
    return dict(sorted(findings.items(), key=lambda item: ALARMS[item[0]].level != "alarm"))


def numbered(runs: Sequence[ReportRun]) -> dict[str, int]:
    """The number of each alarm on the page, from 1."""
    return {name: number for number, name in enumerate(raised(runs), start=1)}


def verdict(runs: Sequence[ReportRun]) -> Html:
    """One sentence on how many alarms rose, and whether the KL was looked at."""
    alarms, raised_in = any(run.diagnosis.failed() for run in runs), sum(bool(run.diagnosis.findings) for run in runs)
    text = judged([run.diagnosis for run in runs])
    if len(runs) > 1 and raised_in:
        text += f", in {raised_in} of {len(runs)} runs"
    if len(runs) == 1:
        text += f"; {coverage(runs[0].diagnosis)}"
    blind = [run.name for run in runs if run.diagnosis.blind or run.diagnosis.empty]
    text += f"; the KL was not looked at{_of(blind, runs)}" if blind else ""
    tone = "alarm" if alarms else "note" if raised_in or blind else "sound"
    sign = element("span", "▲" if alarms else "●" if blind else "✓", aria_hidden="true")
    return element("p", sign, Html(" "), element("a", text, href="#alarms"), class_=f"verdict {tone}")


def alarm_section(runs: Sequence[ReportRun], anchors: Anchors) -> Html:
    """The section about all alarms of the runs."""
    alarms = enumerate(raised(runs).values(), start=1)
    parts = [_finding(runs, number, findings, anchors) for number, findings in alarms]
    quiet = [run.name for run in runs if not (run.diagnosis.findings or run.diagnosis.empty)]
    if quiet:
        parts.append(element("p", f"Nothing was found{_of(quiet, runs)}.", class_="missing"))
    blind: dict[str, list[str]] = {}
    for run in runs:
        blind.setdefault(run.diagnosis.blind, []).append(run.name)
    parts += [
        element("p", f"The KL was not looked at{_of(names, runs)}: {why}.", class_="missing")
        for why, names in blind.items()
        if why
    ]
    return join([*_cautions(runs), *parts, *_unchecked(runs)])


def _of(names: Sequence[str], runs: Sequence[ReportRun]) -> str:
    return f" in {', '.join(names)}" if len(runs) > 1 else ""


def _cautions(runs: Sequence[ReportRun]) -> list[Html]:
    """What the runs were warned of, each caution once, with the runs that it was said to."""
    run_names: dict[str, list[str]] = {}
    for run in runs:
        for caution in run.history.cautions:
            run_names.setdefault(caution, []).append(run.name)
    where = {text: f"{', '.join(names)}: " if len(runs) > 1 else "" for text, names in run_names.items()}
    return [element("p", element("b", "Caution. "), f"{where[text]}{text}", class_="aside") for text in run_names]


def _finding(runs: Sequence[ReportRun], number: int, findings: Mapping[int, AlarmFinding], anchors: Anchors) -> Html:
    alarm = next(iter(findings.values())).alarm
    several = len(runs) > 1
    symbol = element("span", "▲" if alarm.level == "alarm" else "●", aria_hidden="true")
    sign = element("span", symbol, f" {number}", class_="sign")
    where = f"in {len(findings)} of {len(runs)} runs" if several else next(iter(findings.values())).since
    evidence = [
        element(
            "dd", *([element("b", runs[run].name), f", {finding.since}: "] if several else []), finding.evidence.text
        )
        for run, finding in findings.items()
    ]
    causes = dict.fromkeys(cause for finding in findings.values() for cause in finding.evidence.causes)
    likely = [("Likely", [element("dd", cause) for cause in causes])] if causes else []
    facts = [
        ("Seen", evidence),
        *likely,
        ("Means", [element("dd", alarm.means)]),
        ("Next step", [element("dd", alarm.next_step)]),
    ]
    return element(
        "article",
        element(
            "header",
            element("h3", sign, Html(" "), alarm.text[:1].upper() + alarm.text[1:]),
            Html(" "),
            element("span", f"{alarm.level}: ", element("code", alarm.name), f", {where}", class_="since"),
        ),
        element("dl", *(element("div", element("dt", name), *texts) for name, texts in facts)),
        *_tokens(runs, findings, anchors),
        class_=f"finding {alarm.level}",
        id=f"alarm-{number}",
    )


def _tokens(runs: Sequence[ReportRun], findings: Mapping[int, AlarmFinding], anchors: Anchors) -> list[Html]:
    """A table of the tokens to blame; of several runs only the worst few of each."""
    several = len(runs) > 1
    rows: list[list[str]] = []
    for run, finding in findings.items():
        read = runs[run].read
        for token in finding.evidence.tokens[: FEW if several else None]:
            row = _blamed(token, shown(read(token.token), longest=NARROW), anchors, run)
            rows.append([*row, runs[run].name] if several else row)
    headings = ("token", "policy", "other", "share of the k3", "where", *(("run",) if several else ()))
    return [plain_table(headings, rows, caption="tokens to blame")] if rows else []


def _blamed(token: Blamed, text: str, anchors: Anchors, run: int) -> list[str]:
    number, entry = anchors.get((run, token.step, token.completion), (None, None))
    place = f"step {token.step}, completion {token.completion + 1}, position {token.position + 1}"
    return [
        element("code", text.strip("\n")),
        probability(token.policy_logprob),
        probability(token.other_logprob),
        f"{100 * token.share:.0f} %",
        place if number is None or entry is None else jump(entry, number, token.position),
    ]


def _unchecked(runs: Sequence[ReportRun]) -> list[Html]:
    """What could not be checked because the records lack it; runs that lack the same are named together."""
    same: dict[tuple[int, tuple[tuple[str, str], ...]], list[str]] = {}
    for run in runs:
        same.setdefault((run.diagnosis.concerned, tuple(run.diagnosis.unchecked.items())), []).append(run.name)
    parts = list[Html]()
    for (concerned, unchecked), names in same.items():
        rows = [
            element("div", element("dt", element("code", name)), element("dd", f"needs {gap}"))
            for name, gap in unchecked
        ]
        summary = element("summary", f"{len(unchecked)} of {concerned} could not be checked{_of(names, runs)}")
        parts += [element("details", summary, element("dl", *rows, class_="unchecked"), class_="data")] if rows else []
    return parts
