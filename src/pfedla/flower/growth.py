"""One more site in a deployment that has run already."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import torch

from pfedla.elsewhere import went_on, widen_run
from pfedla.errors import ConfigError, RunError
from pfedla.flower.certificates import write_key
from pfedla.flower.deployment import CONFIG, Deployment
from pfedla.flower.fleet import JOINED
from pfedla.record import write_text

__all__ = ["add_site"]

NEW = {"versions": JOINED, "nodes": 0}  # a new site's, in a checkpoint
SITES = re.compile(r"^sites\s*=\s*\[[^\]]*\]", re.MULTILINE)


def add_site(folder: Path, name: str, run: Path, out: Path) -> int:
    """Give a deployment one more site, and its run a row for it; return the round from which it takes part.

    The run in `run` is left alone: `out` gets a copy of it that goes on with the new site, the other rows as they
    were. Then `pfedla.toml` names the site, and a key of its own is written, if the others have theirs here.
    """
    app = folder / "app"
    deployment = Deployment.load(app)
    sites = (*deployment.deploy.sites, name)
    deploy = replace(deployment.deploy, sites=sites)  # which refuses a name that is no site's, or a second one
    text = (app / CONFIG).read_text(encoding="utf-8")
    if len(SITES.findall(text)) != 1:
        raise ConfigError(f"{app / CONFIG} has no single line `sites = [...]` to be changed")
    setting = deployment.setting(deployment.code())
    experiment = replace(deployment.experiment, data=replace(deployment.experiment.data, clients=len(sites)))
    before = {name: torch.zeros(len(sites) - 1, dtype=torch.int64) for name in ("versions", "nodes")}
    t = widen_run(
        run,
        experiment,
        name,
        setting,
        before,
        lambda found: {name: torch.cat([found[name], torch.tensor([new])]) for name, new in NEW.items()},
        out,
    )
    place, authority = folder / "sites" / name, folder / "server" / "ca.crt"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if deploy.registered and not (place / "key").exists():
            write_key(place / "key")
        if authority.is_file():
            (place / "ca.crt").write_bytes(authority.read_bytes())
        write_text(app / CONFIG, SITES.sub(lambda _: f"sites = {json.dumps(list(sites))}", text))
        went_on(run, out)
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from error
    return t + 1
