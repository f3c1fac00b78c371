"""The report of a run, as JSON and in Markdown. Pure."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from tests.chaos import checker
from tests.chaos.run import Result

SHOWN = 40  # findings in the Markdown; the JSON has all


def as_json(result: Result, *, command: str, revision: str) -> dict[str, Any]:
    """All but the log itself, which lies beside it."""
    return {
        "command": command,
        "revision": revision,
        "seed": result.seed,
        "lasted_s": round(result.lasted_s, 1),
        "faults": len(result.history.struck),
        "requests": len(result.history.sent),
        "outcomes": {kind: dict(found) for kind, found in checker.outcomes(result.history).items()},
        "rounds": [
            {
                "faults": [asdict(one) for one in told.faults],
                "recovered_s": round(told.recovered_s, 2),
            }
            for told in result.rounds
        ],
        "growths": [asdict(one) for one in result.growths if one.is_judged],
        "findings": [asdict(one) for one in result.findings],
    }


def markdown(result: Result, *, command: str, revision: str) -> str:
    """For people."""
    history = result.history
    actions = Counter(one.name for one in history.struck)
    pairs = sum(len(told.faults) > 1 for told in result.rounds)
    recovered = sorted(told.recovered_s for told in result.rounds) or [0.0]
    middle = recovered[len(recovered) // 2]
    lines = [
        f"`{command}`, seed {result.seed}, {result.lasted_s:.0f} s, revision {revision}:",
        "",
        f"- {len(history.struck)} faults injected in {len(result.rounds)} strikes, {pairs} of them pairs;",
        f"- {len(history.sent)} requests checked, {len(history.executions)} executions of the LLM server;",
        f"- every kind was served again after {middle:.1f} s in the middle, {recovered[-1]:.1f} s at most;",
        f"- {len(result.findings)} findings.",
        "",
        "| kind | requests | right | what else came |",
        "|---|---|---|---|",
    ]
    for kind, found in sorted(checker.outcomes(history).items()):
        others = ", ".join(f"`{name}` {count}" for name, count in found.most_common() if name != "ok")
        lines.append(f"| {kind} | {found.total()} | {found['ok']} | {others} |")
    lines += [
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(actions.items())),
    ]
    judged = [one for one in result.growths if one.is_judged]
    if judged:
        lines += [
            "",
            "| process | watched | memory, MiB | per hour | descriptors | per hour |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {one.process} | {one.watched_s:.0f} s | {one.mib[0]:.1f} -> {one.mib[1]:.1f} | {one.mib_per_hour:+.1f} "
            f"| {one.descriptors[0]:.1f} -> {one.descriptors[1]:.1f} | {one.descriptors_per_hour:+.1f} |"
            for one in judged
        ]
    if result.findings:
        lines += ["", "Findings:", ""]
        lines += [f"- {one.rule}: {one.text}" for one in result.findings[:SHOWN]]
    return "\n".join(lines) + "\n"
