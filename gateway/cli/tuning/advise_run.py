"""What `gateway advise` does with its options: looks at a stack or reads a sweep, asks the simulator, and tells."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import typer

from gateway.cli.admin_client import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE, Failure, Refusal, admin_of, stack_told
from gateway.cli.doctor import settings_of, wait
from gateway.cli.doctor_looks import TIMEOUT_S, Looker, Places
from gateway.cli.show import seconds_of, show_json
from gateway.cli.terminal import say
from gateway.cli.trust import system_trust
from gateway.cli.tuning.options import slo_of
from gateway.settings import Settings, TritonSettings
from gateway.tuning.advising.reading import BatchTimes, situations, times_of
from gateway.tuning.advising.search import advise
from gateway.tuning.advising.situation import Advice, Situation
from gateway.tuning.advising.sweeps import SweepFault, at_rate, is_plain, measured, setting_of
from gateway.tuning.advising.writing import config_diff, edited, gateway_diff, unified
from gateway.tuning.curves import CurveError, parse_curve
from gateway.tuning.slo import Slo

FORM: Final = "advice/1"
LONGEST_S: Final = 3600  # what `/overview` keeps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command's options, as they are in its help."""

    config: Path
    ops_url: str
    servers: Sequence[str]
    between: str
    slo: str
    sweep: Path | None
    rate: float
    config_pbtxt: Path | None
    as_json: bool
    admin_url: str
    admin_token: str = dataclasses.field(repr=False)


def run(asked: Asked) -> None:
    """Advise, tell, and end the command with its exit code."""
    slo = slo_of(asked.slo)
    if asked.sweep is not None:
        found = _from_sweep(asked.sweep, rate=asked.rate, slo=slo, file=asked.config_pbtxt)
        _end([found], (), as_json=asked.as_json)
    if asked.rate or asked.config_pbtxt is not None:
        raise Failure("--rate and --config-pbtxt go with --sweep", EXIT_USAGE)
    span_s = seconds_of(asked.between, "--for")
    if not 1 <= span_s <= LONGEST_S:
        raise Failure("--for: between 1s and 1h", EXIT_USAGE)
    _from_stack(asked, slo, span_s=span_s)


# --- a running stack -----------------------------------------------------------------------------------


def _from_stack(asked: Asked, slo: Slo | None, *, span_s: int) -> None:
    admin = admin_of(asked.admin_url, asked.admin_token)
    stack = told if (told := stack_told()).get("admin_url") == admin.url else {}  # another stack's are not ours
    places = Places(
        ops_url=asked.ops_url or str(stack.get("ops_url", "")),
        servers=asked.servers or ([str(stack["triton_http"])] if stack.get("triton_http") else ()),
    )
    looker = Looker(admin, settings := settings_of(asked.config), places)
    try:
        old = _statistics(looker)
        before = looker.look(span_s)
        wait(span_s)
        after, new = looker.look(span_s), _statistics(looker)
        facts = looker.facts(before, after, target_p99_ms=None)
    except Refusal as refusal:
        # Status 1 means that there is something to change, and nothing else.
        code = EXIT_UNREACHABLE if refusal.exit_code == EXIT_REFUSED else refusal.exit_code
        raise Failure(refusal.line, code) from refusal
    times = _times(old, new, settings)
    texts = {setup.file: _text(Path(setup.file)) for setup in facts.setups if setup.file}
    found = [
        one if isinstance(one, Advice) else _written(one, advise(one, slo=slo), texts, asked.config)
        for one in situations(facts, times, texts=texts)
    ]
    unseen = [line for line in looker.unseen if not line.startswith("GPU memory")]  # it is not asked for
    _end(found, unseen, as_json=asked.as_json)


def _statistics(looker: Looker) -> dict[str, Mapping[str, Any]]:
    """What each server counts of its models now; those that do not say are told of."""
    found: dict[str, Mapping[str, Any]] = {}
    for server in looker.places.servers:
        url = server.partition("=")[2] if "=" in server.partition("/")[0] else server
        try:
            answer = httpx.get(
                f"{url.rstrip('/')}/v2/models/stats", timeout=TIMEOUT_S, trust_env=False, verify=system_trust()
            )
            found[server] = answer.raise_for_status().json()
            times_of([found[server]], [found[server]])  # raises for what are no statistics
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            found.pop(server, None)
            looker.unseen[f"times by batch size at {url}: no model server answers there"] = None
    return found


def _times(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]], settings: Settings
) -> dict[tuple[str, str], dict[int, BatchTimes]]:
    """By backend and model; a server of no named backend is one of each that speaks its protocol, as for the doctor."""
    found: dict[tuple[str, str], dict[int, BatchTimes]] = {}
    speaking = [name for name, one in settings.backends.items() if isinstance(one, TritonSettings) and one.enabled]
    for backend in speaking:
        both = [
            server
            for server in old.keys() & new.keys()
            if "=" not in server.partition("/")[0] or server.partition("=")[0] == backend
        ]
        told = times_of([old[server] for server in both], [new[server] for server in both])
        found |= {(backend, model): sizes for model, sizes in told.items()}
    return found


def _text(path: Path) -> str:
    """A configuration; empty where a server told it, and there is no file here."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _written(situation: Situation, advice: Advice, texts: Mapping[str, str], config: Path) -> Advice:
    """With what to write, and where."""
    if advice.setting is None or advice.advised is None:
        return advice
    if advice.advised.max_in_flight != advice.setting.max_in_flight:
        each = max(1, advice.advised.max_in_flight // situation.workers)
        diff = gateway_diff(_text(config), str(config), backend=situation.backend, max_in_flight=each)
        return dataclasses.replace(advice, where=str(config), diff=diff)
    diff = config_diff(texts.get(situation.file, ""), situation.file, before=advice.setting, after=advice.advised)
    return dataclasses.replace(advice, where=situation.file, diff=diff)


# --- a sweep -------------------------------------------------------------------------------------------


def _from_sweep(folder: Path, *, rate: float, slo: Slo | None, file: Path | None) -> Advice:
    sweep = _document(folder / "sweep.json")
    text = _text(file) if file is not None else ""
    if file is not None and not text:
        raise Failure(f"--config-pbtxt {file}: cannot be read", EXIT_USAGE)
    try:
        advice = measured(sweep)
        if rate:
            curve = parse_curve(_document(folder / "curve.json"))
            advice = advise(at_rate(sweep, curve, rate=rate), slo=slo)
    except (SweepFault, CurveError) as error:
        raise Failure(f"--sweep {folder}: {error}", EXIT_USAGE) from error
    if advice.setting is None or advice.advised is None:
        return advice
    best = str(sweep.get("config_pbtxt", ""))
    name = str(file or "config.pbtxt")
    if rate or is_plain(sweep):
        now = text or _as_found(best, sweep)
        diff = config_diff(now, name, before=advice.setting, after=advice.advised)
    else:
        diff = unified(text, best, name)
    return dataclasses.replace(advice, where=name, diff=diff)


def _as_found(best: str, sweep: Mapping[str, Any]) -> str:
    """The configuration before the sweep, out of the one that it wrote; empty where that cannot be told."""
    if not is_plain(sweep):
        return ""
    chosen, found = (setting_of(sweep["runs"][sweep[name]]) for name in ("chosen", "found"))
    plain = "\n".join(line for line in best.splitlines() if not line.startswith("#"))  # why it was chosen
    return edited(plain, chosen, found) or ""


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Failure(f"--sweep: {path}: {error.strerror}", EXIT_USAGE) from error
    except ValueError as error:
        raise Failure(f"--sweep: {path}: not JSON: {error}", EXIT_USAGE) from error
    if not isinstance(document, dict):
        raise Failure(f"--sweep: {path}: must be an object", EXIT_USAGE)
    return document


# --- what is told --------------------------------------------------------------------------------------


def _end(found: Sequence[Advice], unseen: Sequence[str], *, as_json: bool) -> None:
    """Tell it, and end the command."""
    changed = [one for one in found if one.advised is not None]
    if as_json:
        show_json({"form": FORM, "advice": [_plain(one) for one in found], "unseen": list(unseen)})
    else:
        for one in found:
            _tell(one)
        for line in unseen:
            say(f"not seen: {line}")
        if not found:
            say("nothing to change, because no model was under load" if not unseen else "no model was seen under load")
    raise typer.Exit(EXIT_REFUSED if changed else 0)


def _plain(advice: Advice) -> dict[str, Any]:
    """For programs; what has no bound is null, which JSON knows."""
    document: dict[str, Any] = dataclasses.asdict(advice)
    for name in ("before", "after"):
        if document[name] is not None:
            document[name] = {key: value if math.isfinite(value) else None for key, value in document[name].items()}
    return document


def _tell(advice: Advice) -> None:
    if advice.advised is None:
        say(f"{advice.subject}: nothing to change, because {advice.because}")
    else:
        say(f"{advice.subject}: {advice.because}")
        say(f"  expected: {advice.aim} better by {advice.gain:.0%}")
    for line in advice.evidence:
        say(f"  evidence: {line}")
    if advice.advised is None:
        return
    for line in advice.assumes:
        say(f"  assumes:  {line}")
    say(f"  write{f' in {advice.where}' if advice.where else ''}:")
    for line in advice.diff.splitlines():
        say(f"    {line}")
