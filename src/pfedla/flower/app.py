"""The two halves of a Flower app: what runs on the server, and what runs at a site.

An app's own file is three lines::

    HERE = Path(__file__).parent
    server = server_app(HERE)
    client = client_app(HERE)
"""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from pfedla.elsewhere import open_run, run_on
from pfedla.errors import PfedlaError
from pfedla.flower.deployment import Deployment
from pfedla.flower.fleet import FlowerFleet
from pfedla.flower.messages import CALL, KEPT, KINDS
from pfedla.flower.roster import Roster
from pfedla.flower.site import Site, fault
from pfedla.result import Result
from pfedla.rounds import Progress

__all__ = ["client_app", "serve", "server_app"]

log = logging.getLogger("pfedla")


def client_app(folder: Path | str) -> ClientApp:
    """Return the app of a site, for the deployment in a folder."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        _tell()
        try:
            site = Site.of(Deployment.load(folder), context)
        except PfedlaError as error:
            log.error("%s", error)
            return Message(fault(str(error)), reply_to=message)
        return Message(site.handle(message), reply_to=message)

    for kind in (*KINDS.values(), CALL, KEPT):
        category, _, action = kind.partition(".")
        register = {"train": app.train, "evaluate": app.evaluate, "query": app.query}[category]
        (register(action) if action else register())(handle)
    return app


def server_app(folder: Path | str) -> ServerApp:
    """Return the app of the server, for the deployment in a folder.

    Its run configuration has `out`, the run's folder, `resume`, and `accept`: sites that changed are known to have.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _tell()
        asked = context.run_config
        resume, accept = bool(asked["resume"]), bool(asked.get("accept", False))
        try:
            serve(Deployment.load(folder), grid, Path(str(asked["out"])), resume=resume, accept=accept)
        except PfedlaError as error:
            log.error("error: %s", error)
            raise

    return app


def serve(deployment: Deployment, grid: Grid, out: Path, *, resume: bool = False, accept: bool = False) -> Result:
    """Run a deployment's rounds with the sites that are behind a grid, and leave a run's record in `out`.

    A complete run is resumed, too: with more rounds to go on, else to hand out its models again. `accept` takes in
    sites that have another key than before, and goes on where no site has what it kept.
    """
    deploy, experiment = deployment.deploy, deployment.experiment
    setting = deployment.setting(deployment.code())
    spec, template = setting.spec, setting.template
    roster = Roster(
        grid, deploy.sites, spec, template, registered=deploy.registered, timeout=deploy.timeout, accept=accept
    )
    log.info("waiting for the sites %s", ", ".join(deploy.sites))
    roster.gather(deploy.fewest, deploy.patience)
    examples = [roster.examples.get(client, 0) for client in range(len(deploy.sites))]
    tells = {"models": deploy.models, "scores": deploy.scores, "examples": deploy.examples}
    record = open_run(experiment, deploy.sites, examples, out, resume=resume, tells=tells, accept=accept)
    fleet = FlowerFleet(
        roster,
        setting.spec,
        record.facts()["id"],
        timeout=deploy.timeout,
        fewest=deploy.fewest,
        tries=deploy.tries,
        models=deploy.models,
        objective=setting.objective,
    )
    result = run_on(fleet, setting, experiment, record, _watch)
    log.info("the run is complete: %s", out)
    return result


def _watch(progress: Progress) -> None:
    name = progress.objective.headline
    record = progress.record or {}
    score = record.get(f"{name}_mean")
    latest = f", {name} {score:.4f} after round {record['round']}" if score is not None else ""
    log.info("round %d of %d%s", progress.t, progress.rounds, latest)


def _tell() -> None:
    """Have what is logged appear where Flower's processes write."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
