"""`python -m tests.fuzz`: try many inputs, and say how many; see docs/hostile-input.md."""

import argparse
import sys
import traceback

from tests.fuzz import TARGETS
from tests.fuzz.target import Report, Target, attack
from tests.kit.ending import sigterm_as_ctrl_c

PLANES = "planes"  # schemathesis over the documents of both, and the attacks by raw sockets


def main() -> int:
    """1 where something was found."""
    asked = _arguments()
    names = [*(target.name for target in TARGETS), PLANES]
    unknown = [name for name in asked.only if name not in names]
    if unknown:
        print(f"no such target: {', '.join(unknown)}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    sigterm_as_ctrl_c()
    print(f"seed {asked.seed}, {asked.examples:,} examples for each target (a tenth where one takes long)", flush=True)
    chosen = [target for target in TARGETS if not asked.only or target.name in asked.only]
    reports = [_tried(target, asked.examples, asked.seed) for target in chosen]
    failed = [report.name for report in reports if report.failure is not None]
    tried, count = sum(report.tried for report in reports), len(reports)
    if PLANES in asked.only or not asked.only:
        more, found = _planes(asked.plane_examples or max(1, asked.examples // 20), asked.seed)
        tried, count, failed = tried + more[0], count + more[1], failed + found
    print(f"{tried:,} inputs in {count} targets, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


def _tried(target: Target, examples: int, seed: int) -> Report:
    report = attack(target, examples=examples, seed_number=seed)
    print(report.line(), flush=True)
    if report.failure is not None:
        traceback.print_exception(report.failure)
    return report


def _planes(examples: int, seed: int) -> tuple[tuple[int, int], list[str]]:
    """How many inputs in how many targets, and the names of those that failed."""
    from tests.fuzz import campaign, contract  # noqa: PLC0415 - schemathesis takes seconds to import

    failed, groups = [], []
    with campaign.attacked() as (at, listener):
        # The control plane's operations come last: some of them change what the data plane does.
        groups += [campaign.endpoints(at, stream=stream) for stream in (False, True)]
        for group in groups:
            print(group.line(), flush=True)
        for name, (port, attempts) in campaign.groups(at, listener.port, is_long=True).items():
            groups.append(campaign.run(at, name, port, attempts))
            print(groups[-1].line(), flush=True)
        reports = [_tried(target, examples, seed) for target in contract.operations(at)]
        if listener.heard:
            failed.append(f"an address that a caller named was opened {listener.heard} times")
        for line in at.failures():
            print(f"logged: {line[:1000]}")
            failed.append("a failure in the log")
    for group in groups:
        print("\n".join(group.found[:20]), end="\n" if group.found else "")
    failed += [one.name for one in groups if one.found] + [one.name for one in reports if one.failure is not None]
    return (sum(one.tried for one in [*groups, *reports]), len(groups) + len(reports)), failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Hostile input, by seed.")
    parser.add_argument("--examples", type=int, default=2000, help="inputs for each target")
    parser.add_argument(
        "--plane-examples", type=int, default=0, help="for each operation (default: a twentieth of those)"
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed tries the same inputs")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="TARGET", help="these targets alone; `planes`: both planes"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
