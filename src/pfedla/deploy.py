"""`pfedla deploy`: write a deployment over Flower, and check it before anybody connects."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType

import click
from rich.console import Console

from pfedla.errors import ConfigError

__all__ = ["deploy"]

_folder = click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")


@click.group()
def deploy() -> None:
    """Out of the simulator: sites with their own data, over Flower (extra `flower`)."""


@deploy.command("init")
@_folder
@click.option("--sites", default="north,east,south,west", show_default=True, help="The sites' names.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Where sites reach the server.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="The server's port.")
@click.option("--insecure", is_flag=True, help="No TLS and no keys: for a trial on one machine alone.")
def deploy_init(folder: Path, sites: str, address: str, port: int, insecure: bool) -> None:
    """Write a ready deployment with an example, certificates and keys for a trial, and all commands."""
    _flower().init(folder, [name for name in re.split(r"[,\s]+", sites) if name], address, port, insecure=insecure)
    _say(f"{folder}/README.md has the commands for the server and for every site.")
    if not insecure:
        _say("The certificates and keys are for a trial: made on this machine, their authority's key beside them.")


@deploy.command("check")
@_folder
@click.option("--site", multiple=True, help="Try this site's data alone; several may be named.")
@click.option("--code", metavar="FILE", help="That site's own code, as in its --node-config.")
@click.option("--no-data", is_flag=True, help="Leave data out: they are at the sites, to be tried there.")
def deploy_check(folder: Path, site: tuple[str, ...], code: str | None, no_data: bool) -> None:
    """Try a deployment offline: imports, layers, shapes, data, and a round of one epoch."""
    if no_data and site:
        raise ConfigError("--no-data leaves out what --site asks for")
    for line in _flower().check(folder, site, code, with_data=not no_data):
        _say(line)


@deploy.command("gate")
@click.option("--host", default="0.0.0.0", show_default=True, help="Where to listen.")  # noqa: S104
@click.option("--port", type=click.IntRange(1, 65535), required=True, help="The port that sites reach.")
@click.option("--superlink", required=True, metavar="ADDRESS:PORT", help="Where the SuperLink listens on this machine.")
@click.option("--certificate", type=click.Path(path_type=Path), default="server.pem", show_default=True)
@click.option("--key", type=click.Path(path_type=Path), default="server.key", show_default=True)
@click.option("--authority", type=click.Path(path_type=Path), default="ca.crt", show_default=True)
def deploy_gate(host: str, port: int, superlink: str, certificate: Path, key: Path, authority: Path) -> None:
    """Stand between the sites and the SuperLink: pass on what sites ask for, and refuse everything else."""
    _flower()
    from pfedla.flower.gate import keep_gate

    _say(f"sites may come in at {host}:{port}; Ctrl-C closes the gate")
    keep_gate(host, port, superlink, certificate, key, authority)


@deploy.command("add-site")
@_folder
@click.argument("name")
@click.option("--run", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The run's folder so far.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Its folder from now on.")
def deploy_add_site(folder: Path, name: str, run: Path, out: Path) -> None:
    """Give a deployment that has stopped one more site, NAME, and its run a row for it."""
    _flower()
    from pfedla.flower.growth import add_site

    t = add_site(folder, name, run, out)
    _say(f"{out} goes on with {name} from round {t}, the others as they were; {run} stays as it was, to be read.")
    _say(
        f'Copy sites/{name}/ to the site and start its SuperNode as the others\', with site="{name}" in --node-config.'
    )
    _say("In the deployment's server/ folder:")
    place = Path(os.path.relpath(out, folder / "server")).as_posix()
    if (folder / "sites" / name / "key.pub").exists():
        _say(f"flwr supernode register ../sites/{name}/key.pub sites --name {name}")
    _say(f"flwr run ../app sites --stream --run-config 'out=\"{place}\" resume=true'")


def _flower() -> ModuleType:
    try:
        from pfedla.flower import project
    except ImportError as error:
        raise ConfigError(str(error)) from None
    return project


def _say(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
