"""One page for runs: everything is data, and the same front end shows it from a file or from `pfedla watch`.

The front end lies in `web/`: a template, a style sheet and a module; Plotly draws. Data is thinned to keep the page
small and quick, and the page says where.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.errors import ConfigError, PfedlaError, RunError
from pfedla.record import LAYERS, ROUND
from pfedla.report.runs import Run, spread
from pfedla.report.weights import retained_changes
from pfedla.version import __version__

__all__ = ["POLICY", "asset", "detail_of", "encoded", "overview_of", "plotly", "report", "similarity", "template"]

BUDGET = 8_000_000  # bytes that all weights of a page may take
POINTS, DOTS, MATRIX, FRAMES = 600, 600, 100, 120  # most rounds of a curve, clients as dots, in a matrix; matrices
# Nothing is fetched, and no script runs but those that are named. Plotly sets styles; they can fetch nothing either.
POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
)
MISSING = "this needs Plotly, Starlette and uvicorn: pip install 'pfedla[web]'"


def report(runs: Sequence[Run]) -> str:
    """Return the whole page of some runs: it needs no network, and opens from disk."""
    if not runs:
        raise RunError("there is no run to report on")
    details, share = {}, BUDGET // len(runs)
    listed = [overview_of(run, max(40, min(POINTS, 60_000 // len(runs)))) for run in runs]
    for run, shown in zip(runs, listed, strict=True):
        details[run.id] = detail_of(run, share) if shown["state"] != "unreadable" else {"id": run.id}
    data = encoded({"runs": listed, "details": details, "version": __version__})
    script, style, module = plotly(), asset("page.css"), asset("page.js")
    return template(
        policy=f"{POLICY}; script-src {_hashed(script)} {_hashed(module)}",
        style=f"<style>{style}</style>",
        scripts=f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n'
        f'<script type="module">{module}</script>',
    )


def template(**parts: str) -> str:
    """Return the page with its parts in place."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset("page.html"))


def asset(name: str) -> str:
    """Return a file of the front end."""
    return (files("pfedla.report") / "web" / name).read_text(encoding="utf-8")


def plotly() -> str:
    """Return Plotly's own bundle, from its Python package."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(MISSING) from None
    return re.sub(r"<(?=/script|!--)", r"\\x3c", str(get_plotlyjs()))


def encoded(value: Any) -> str:
    """Return JSON that may stand in a page: no character in it means anything to HTML."""
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))  # ASCII alone
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hashed(text: str) -> str:
    """Return the word by which a content policy knows a script or a style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _plain(value: Any) -> Any:
    """Return what JSON can hold; numbers that are none become null."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# ---- what is shown of a run among others


def overview_of(run: Run, points: int = POINTS) -> dict[str, Any]:
    """Return how a run stands, and its curves; of one that cannot be read, why."""
    shown = {"id": run.id, "name": run.name, "label": run.name, "algorithm": "", "seed": 0, "version": run.id}
    try:
        return shown | _overview(run, points)
    except Exception as error:  # a damaged record can raise nearly anything, and must not hide the others
        why = str(error) if isinstance(error, PfedlaError) else f"{type(error).__name__}: {error}"
        return shown | {"state": "unreadable", "error": why[:500], "rounds": 0, "round": 0, "curve": {}, "last": {}}


def _overview(run: Run, points: int) -> dict[str, Any]:
    name, history, record = run.headline, run.history, run.record
    kept = _thinned(history, points, int(run.setting("schedule", "rounds", 0)))
    keys = {
        "round": "round",
        "mean": f"{name}_mean",
        "prior": f"{name}_class_prior",
        "worst": f"{name}_worst",
        "after": f"{name}_after_training",
        "down": "bytes_down",
        "up": "bytes_up",
        "seconds": "seconds",
    }
    curve = {short: [_number(line.get(key)) for line in kept] for short, key in keys.items()}
    last = {short: values[-1] for short, values in curve.items() if values}
    last["std"] = _number(history[-1].get(f"{name}_std")) if history else None
    if (state := record.state) == "done":
        last["seconds"] = _number(record.summary().get("seconds"))
    return {
        "label": run.label,
        "seed": run.seed,
        "state": state,
        "error": record.error if state == "failed" else "",
        "algorithm": run.algorithm,
        "dataset": run.dataset,
        "clients": len(run.names),
        "rounds": int(run.setting("schedule", "rounds", 0)),
        "round": int(last.get("round") or 0),
        "headline": name,
        "percent": run.percent,
        "higher": run.higher_is_better,
        "scored_on": str(run.facts.get("scored_on", "test")),
        "curve": curve,
        "last": last,
        "evaluated": len(history),
        "version": "-".join(map(str, [run.id, state, *record.changed()])),
    }


def _thinned(history: list[dict[str, Any]], points: int, rounds: int) -> list[dict[str, Any]]:
    """Return about so many evaluations and the last: of seeds with as many planned rounds, of the same rounds."""
    if len(history) <= points:
        return history
    apart = -(-max(rounds, len(history)) // points)
    first = {line["round"] // apart: place for place, line in reversed(list(enumerate(history)))}
    return [history[place] for place in sorted({*first.values(), len(history) - 1})]


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# ---- what is shown of one run alone


def detail_of(run: Run, budget: int = BUDGET // 2) -> dict[str, Any]:
    """Return everything about one run: clients, data, bytes, weights, retained layers, and how to repeat it."""
    try:
        ledger, diagnostics = run.record.so_far()
        counts = run.record.holdings()
        found: dict[str, Any] = {
            "clients": _clients(run),
            "holdings": _holdings(run, counts),
            "bytes": _bytes(ledger.arrays()) if ledger is not None else None,
            "weights": _weights(run, diagnostics, counts, budget),
            "retained": _retained(diagnostics),
            "unfinished": not run.record.complete,
        }
    except Exception as error:  # as above
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"id": run.id, **found, **_repeat(run)}


def _clients(run: Run) -> dict[str, Any] | None:
    """Return every client's headline before and after local training, the worst among them."""
    if not run.history:
        return None
    last, names = run.history[-1], run.names
    before, after = (last["clients"].get(f"{run.headline}{part}", []) for part in ("", "_after_training"))
    samples = run.facts.get("samples") or []
    known = [i for i in range(len(before)) if before[i] is not None]
    order = sorted(known, key=lambda i: before[i], reverse=not run.higher_is_better)  # the worst come first
    worst, others = order[:20], order[20:]
    shown = worst + [others[i] for i in spread(len(others), DOTS - len(worst))]
    return {
        "round": last["round"],
        "name": [names[i] for i in shown],
        "before": [before[i] for i in shown],
        "after": [after[i] if i < len(after) else None for i in shown],
        "samples": [samples[i] if i < len(samples) else None for i in shown],
        "of": len(names),
        "silent": len(names) - len(known),
    }


def _holdings(run: Run, counts: np.ndarray | None) -> dict[str, Any] | None:
    """Return who trains on what; without classes, on how many samples."""
    names, samples = run.names, run.facts.get("samples") or []
    if counts is None and not samples:
        return None
    shown = np.array(spread(len(names), MATRIX))
    if counts is None:
        return {"clients": [names[i] for i in shown], "train": [samples[i][0] for i in shown], "of": len(names)}
    held = np.flatnonzero(counts.sum((0, 2)))
    classes = [str(name) for name in run.facts["classes"]]
    most = held[np.sort(np.argsort(-counts[:, held, 0].sum(0), kind="stable")[:MATRIX])]
    return {
        "clients": [names[i] for i in shown],
        "classes": [classes[c] for c in most],
        "counts": counts[np.ix_(shown, most)][..., 0],
        "of": len(names),
        "of_classes": len(held),
    }


def _bytes(lines: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the bytes of all rounds so far by layer and direction, and those beside the layers."""
    beside = {way: sum(int(x.sum()) for key, x in lines.items() if key.startswith(f"{way}:")) for way in ("down", "up")}
    return {
        "layers": lines["layers"],
        "down": lines["down"].sum(0),
        "up": lines["up"].sum(0),
        "beside": beside,
        "round": int(lines["round"].max(initial=0)),
    }


def similarity(counts: np.ndarray) -> np.ndarray:
    """Return the cosine of the clients' label distributions, from counts `(clients, classes)`."""
    lengths = np.linalg.norm(counts, axis=1, keepdims=True)
    unit = counts / np.where(lengths, lengths, 1)
    found: np.ndarray = unit @ unit.T  # (clients, clients)
    return found


def _weights(
    run: Run, diagnostics: dict[str, np.ndarray], counts: np.ndarray | None, budget: int
) -> dict[str, Any] | None:
    """Return who learns from whom over the rounds, layer by layer; None for methods without weights.

    Of many clients and rounds some are shown, so that all matrices together stay within the budget.
    """
    alpha, n = diagnostics.get("alpha"), len(run.names)
    if alpha is None or alpha.ndim != 4 or alpha.shape[1] != n or not alpha.size:
        return None
    records, layers = len(alpha), alpha.shape[2]
    size = 8 / 3  # bytes of a weight: two, written in base64
    most = max(2, min(MATRIX, math.isqrt(int(budget / size / layers / 2))))
    ids = np.array(spread(n, most))
    frames = spread(records, max(2, min(FRAMES, int(budget / size / layers / len(ids) ** 2))))
    candidates = diagnostics.get("candidates")
    shown = np.stack([_square(alpha[r], None if candidates is None else candidates[r], ids) for r in frames])
    own = np.stack([_own(alpha[r], None if candidates is None else candidates[r]) for r in frames])
    alike = None if counts is None else similarity(counts[ids, :, 0])
    names = [str(name) for name in diagnostics.get(LAYERS, ())]
    groups = run.groups()
    return {
        "clients": [run.names[i] for i in ids],
        "layers": names if len(names) == layers else ["all layers"] if layers == 1 else [*map(str, range(layers))],
        "rounds": diagnostics[ROUND][frames],
        "values": base64.b64encode((shown.clip(0, 1) * 65535).round().astype("<u2").tobytes()).decode(),
        "own": own,  # (rounds, layers)
        "similarity": alike,
        "agreement": None if alike is None else [[_agreement(w, alike) for w in frame] for frame in shown],
        "groups": None if groups is None else groups[ids],
        "of_clients": n,
        "of_rounds": len(alpha),
    }


def _square(alpha: np.ndarray, candidates: np.ndarray | None, ids: np.ndarray) -> np.ndarray:
    """Return the weights of some clients on each other, `(layers, clients, clients)`."""
    if candidates is None:
        chosen: np.ndarray = alpha[ids][..., ids].transpose(1, 0, 2)
        return chosen
    place = np.full(len(alpha), -1)
    place[ids] = np.arange(len(ids))
    columns = place[candidates[ids]]  # (clients, candidates), -1 for who is not shown
    found = np.zeros((alpha.shape[1], len(ids), len(ids) + 1))
    for row, client in enumerate(ids):
        found[:, row, columns[row]] = alpha[client]
    return found[..., :-1]


def _own(alpha: np.ndarray, candidates: np.ndarray | None) -> np.ndarray:
    """Return everybody's mean weight on itself, by layer."""
    index = np.arange(len(alpha))
    column = index if candidates is None else (candidates == index[:, None]).argmax(1)
    found: np.ndarray = alpha[index, :, column].mean(0)
    return found


def _agreement(weights: np.ndarray, alike: np.ndarray) -> float | None:
    """Return the correlation of weights and similarities of different clients; None where one of them is constant."""
    other = ~np.eye(len(alike), dtype=bool)
    x, y = weights[other].astype(float), alike[other]
    if len(x) < 2 or np.ptp(x) < 1e-9 or np.ptp(y) < 1e-9:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _retained(diagnostics: dict[str, np.ndarray]) -> dict[str, Any] | None:
    """Return the share of clients at whom each layer stayed, over the rounds."""
    retained = diagnostics.get("retained")
    if retained is None or retained.ndim != 3 or not retained.size or retained.shape[2] != len(diagnostics[LAYERS]):
        return None
    shown = spread(len(retained), FRAMES)
    share = retained[shown].mean(1).T  # (layers, rounds)
    return {
        "layers": diagnostics[LAYERS],
        "rounds": diagnostics[ROUND][shown],
        "share": share,
        "changes": retained_changes(retained),
    }


def _repeat(run: Run) -> dict[str, Any]:
    """Return the configuration, and the command that runs it again."""
    try:
        config = run.record.config.read_text(encoding="utf-8", errors="replace")
        python = run.facts.get("model") == "python"
    except (OSError, PfedlaError) as error:
        return {"config": str(error), "command": ""}
    path = Path(run.record.path)
    command = f"pfedla run {shlex.quote(str(path / run.record.config.name))} --out NEW-FOLDER"
    if python:
        command = "this run came from Python: pfedla.run(...) with the same arguments repeats it"
    elif not run.record.complete:
        command += f"\npfedla run --resume {shlex.quote(str(path))}   # or continue where it stopped"
    return {"config": config, "command": command}
