"""A deployment's folder: written ready to run, and checked before anybody connects.

======================  =====================================================================================
README.md               the exact commands, for the server and for every site
app/                    the Flower app, which Flower carries to every site: `pfedla.toml`, `site_code.py`
server/                 certificates, Flower's configuration; later its database and the run's folder
sites/NAME/             what goes to a site: its key, the authority's certificate; later what it keeps
======================  =====================================================================================
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from string import Template

import numpy as np
import tomli_w

from pfedla.client import Setting
from pfedla.config import Experiment, algorithm_name
from pfedla.data.datasets import load_dataset
from pfedla.errors import ConfigError, DataError, ModelError, PfedlaError, RunError, nearest
from pfedla.fleet import SimulatedFleet
from pfedla.flower.certificates import write_certificates, write_key
from pfedla.flower.deployment import CONFIG, Deploy, Deployment
from pfedla.flower.roster import difference, outline
from pfedla.ledger import Ledger
from pfedla.models import check_model
from pfedla.pool import local_pool
from pfedla.privacy import accountant
from pfedla.randomness import stream
from pfedla.rounds import Server, evaluate, participants, run_round
from pfedla.trackers import trackers_of
from pfedla.training import ClientData
from pfedla.version import __version__

__all__ = ["check", "init"]

EXAMPLE, KINDS = "fashion-mnist-10k", 4  # the example's data set; a site holds so many of its classes
IMAGES = 100  # of a site
NODE_PORT = 9094  # of the first site's SuperNode, open to its own machine alone
ADDRESS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")

APP = '''"""The Flower app: pfedla does the rest. Settings are in pfedla.toml, your model and data in site_code.py."""

from pathlib import Path

from pfedla.flower import client_app, server_app

HERE = Path(__file__).parent
server = server_app(HERE)
client = client_app(HERE)
'''

PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "pfedla-deployment"
version = "1.0.0"
description = "A personalized model for each site"
license = "Apache-2.0"
dependencies = []  # pfedla[flower] is installed everywhere before

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "pfedla"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
out = "run"  # the run's folder, seen from where the SuperLink was started
resume = false
accept = false  # when resuming: sites with another key than before, and sites none of which has what it kept
"""

CODE = '''"""What every site brings: the model, the same everywhere, and its own data, which never leaves it."""

import numpy as np
from torch import nn


def model():
    """Return the common model; the server builds it, too."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def data(site):
    """Return this site's samples, (x, y) or (x, y, x_test, y_test); called at the site alone, in its own folder."""
    with np.load("data.npz") as file:
        return file["x"], file["y"]
'''


def init(folder: Path, sites: Sequence[str], address: str, port: int, *, insecure: bool = False) -> None:
    """Write a deployment with an example in it.

    Parameters
    ----------
    folder
        A new folder.
    sites
        The sites' names.
    address, port
        Where sites reach the server.
    insecure
        No certificates and no keys: for a trial on one machine.
    """
    if insecure and address not in ("localhost", "127.0.0.1"):
        raise ConfigError(f"without TLS and keys the server's address must be this machine's own, not {address!r}")
    if not ADDRESS.fullmatch(address):
        raise ConfigError(f"the server's address must be a name or an IPv4 number, without a port, not {address!r}")
    deploy = Deploy(sites=tuple(sites), fewest=max(1, (len(sites) + 1) // 2), registered=not insecure)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is there already: choose a new folder")
    tables = {
        "deploy": {"sites": list(deploy.sites), "code": deploy.code, "fewest": deploy.fewest}
        | {"registered": deploy.registered, "timeout": deploy.timeout},
        "algorithm": {"name": algorithm_name(Experiment().algorithm)},
        "schedule": {"rounds": 10, "eval_every": 5, "seed": 0},
        "training": {"local_epochs": 5, "batch_size": 32, "lr": 0.05},
    }
    connection: dict[str, object] = {"address": f"127.0.0.1:{port if insecure else _inner(port)}"}
    authority = str((folder / "server" / "ca.crt").resolve())  # Flower asks for the whole path
    connection |= {"insecure": True} if insecure else {"root-certificates": authority}
    try:
        for part in ("app", "server", "server/flwr", *(f"sites/{site}" for site in sites)):
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part).chmod(0o755 if part == "app" else 0o700)  # of others nobody need see runs, models, keys
        texts = {
            f"app/{CONFIG}": tomli_w.dumps(tables),
            "app/app.py": APP,
            f"app/{deploy.code}": CODE,
            "app/pyproject.toml": PROJECT,
            "server/flwr/config.toml": tomli_w.dumps({"superlink": {"default": "sites", "sites": connection}}),
            "README.md": _readme(deploy.sites, address, port, insecure=insecure),
            ".gitignore": "server/*.key\nserver/superlink.db*\nserver/run*/\nsites/*/*\n!sites/*/key.pub\n",
        }
        for name, text in texts.items():
            (folder / name).write_text(text)
        if not insecure:
            write_certificates(folder / "server", address)
        for number, site in enumerate(sites):
            if not insecure:
                write_key(folder / "sites" / site / "key")
                (folder / "sites" / site / "ca.crt").write_bytes((folder / "server" / "ca.crt").read_bytes())
            _example(folder / "sites" / site / "data.npz", number)
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from error


def _readme(sites: Sequence[str], address: str, port: int, *, insecure: bool) -> str:
    """Return the commands, as they are to be given."""
    if insecure:
        note = (
            "**Without TLS and keys: anybody on this machine can read along and pretend to be a site. For a trial on "
            "one machine, and for nothing else.**"
        )
        superlink, node, register, gate = "--insecure", "--insecure", "", ""
    else:
        note = (
            "**The certificates and keys here were made for a trial, valid for 90 days, and the authority's key "
            "(`server/ca.key`) lies unprotected beside them. For data that matter, have your own authority sign the "
            "server's certificate, which must be for 127.0.0.1 beside its name, let every site delete the trial's key, "
            "make its own without a passphrase (`ssh-keygen -t ecdsa -b 384 -N '' -f key`) and send you `key.pub` "
            "alone.** If you move this folder, mend the "
            "path in `server/flwr/config.toml`."
        )
        superlink = (
            "--ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key --enable-supernode-auth"
        )
        gate = GATE.substitute(port=port, inner=_inner(port))
        node = "--root-certificates ca.crt --auth-supernode-private-key key"
        keys = "\n".join(f"flwr supernode register ../sites/{site}/key.pub sites --name {site}" for site in sites)
        register = f"Once, tell the server who may come, and under which name:\n\n```\n{keys}\n```\n"
    every = "\n".join(
        SITE.substitute(site=site, address=address, port=port, node=node, own=NODE_PORT + number)
        for number, site in enumerate(sites)
    )
    inner = port if insecure else _inner(port)
    return README.substitute(
        note=note,
        superlink=superlink,
        port=inner,
        gate=gate,
        register=register,
        every=every,
        version=__version__,
        again="the SuperLink" if insecure else "the SuperLink and the gate",
    )


def _inner(port: int) -> int:
    """Return the port of the SuperLink behind the gate."""
    return port + 1 if port < 65535 else port - 1


README = Template("""# A personalized model for each site

$note

Every machine needs version $version of pfedla with its extra `flower`, and a clock that is right; `app/` is carried to
the sites by Flower. Put your model and the way to your data into `app/site_code.py`, your settings into
`app/pfedla.toml`, and see whether all fits:

```
pfedla deploy check .
```

## The server

In `server/`, in a terminal of its own:

```
export FLWR_HOME="$$PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
flower-superlink $superlink --host 127.0.0.1 --port $port --database superlink.db \\
    --disable-runtime-dependency-installation
```

${gate}In a further terminal, in `server/`, too:

```
export FLWR_HOME="$$PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
```

$register
When the sites' SuperNodes are started (below), start the run; its folder is `server/run`:

```
flwr run ../app sites --stream
```

After a crash, start $again as before, and resume the run from its latest complete round:

```
flwr run ../app sites --stream --run-config resume=true
```

## The sites

Copy `sites/NAME/` to the site NAME, over a channel you trust. In that folder:

$every
Before the run a site can see whether its data fit. Copy `app/` there, too, so that one folder has `app/` and
`sites/NAME/`, and in that folder:

```
pfedla deploy check . --site NAME
```

At the end the site's model is in `state/model.safetensors`. In that folder, with `model` what your `model()` returns:

```python
from safetensors.torch import load_file; model.load_state_dict(load_file("state/model.safetensors")); model.eval()
```

It takes inputs as it was trained on: images of bytes (uint8) were scaled, `x / 127.5 - 1`, everything else was not.
""")

GATE = Template("""\
It takes commands from whoever reaches it, so it listens to this machine alone. The gate, in a second terminal in
`server/`, lets in sites, and nothing but sites:

```
pfedla deploy gate --port $port --superlink 127.0.0.1:$inner
```

""")

SITE = Template("""### $site

```
export FLWR_HOME="$$PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
flower-supernode --superlink $address:$port $node --port $own --node-config 'site="$site" state="state"'
```
""")


def _example(path: Path, number: int) -> None:
    """Write an example's data: a few images of a few kinds of clothes, two sites each of the same kinds."""
    images = load_dataset(EXAMPLE)
    first = number // 2 * 2
    kinds = [(first + kind) % len(images.classes) for kind in range(KINDS)]
    index = np.flatnonzero(np.isin(images.y, kinds))[number % 2 + number // 10 :: 2][:IMAGES]
    np.savez_compressed(path, x=images.x[index], y=images.y[index])


def check(folder: Path, only: Sequence[str] = (), own_code: str | None = None, *, with_data: bool = True) -> list[str]:
    """Try a deployment without any network: code, model, data, and a round of one epoch; return what was found.

    `only` some sites' data are tried, where the others' are not at hand; one site's with `own_code`, if it brings some.
    Without data, code, settings and model are tried alone.
    """
    deployment = Deployment.load(folder / "app")
    deploy, experiment = deployment.deploy, deployment.experiment
    for name in ("pyproject.toml", "app.py"):
        if not (folder / "app" / name).is_file():
            raise ConfigError(f"{folder / 'app' / name} is missing")
    code = deployment.code()
    setting = deployment.setting(code)
    participants(experiment.schedule, 0, len(deploy.sites))
    trackers_of(experiment.machine.track)
    if experiment.privacy.noise:
        accountant()
    spec = setting.spec
    if own_code:
        if len(only) != 1:
            raise ConfigError("code of a site's own is tried with its data: name that site (--site)")
        code = deployment.code(own_code)
        theirs = deployment.setting(code)
        if different := difference(outline(spec, setting.template), outline(theirs.spec, theirs.template)):
            raise ModelError(f"site {only[0]} has another model than the server: {different}")
    found = [f"model: {spec.parameters:,} parameters in the layers {', '.join(spec.names)}"]
    data: dict[int, ClientData] = {}
    if strange := set(only) - set(deploy.sites):
        raise ConfigError(f"deploy.sites has no {min(strange)!r}: {nearest(min(strange), deploy.sites)}")
    for client, site in enumerate(deploy.sites if with_data else ()):
        place = folder / "sites" / site
        if only and site not in only:
            continue
        if only and not place.is_dir():
            raise DataError(f"site {site}: there is no folder {place}")
        if not place.is_dir():
            found.append(f"site {site}: it has no folder here; its data are not checked")
            continue
        try:
            with contextlib.chdir(place):
                federation = deployment.data(code, site)
        except DataError as error:
            hint = "" if only else " (if its data are not here, leave data out here, and try them at the site)"
            raise DataError(f"{error}{hint}") from error
        samples = federation.data[0]
        try:
            check_model(setting.template, setting.objective, federation.data, ["its data"])
        except PfedlaError as error:
            raise type(error)(f"site {site}: {error}") from None
        data[client] = samples
        found.append(f"site {site}: {len(samples.train)} samples to train on, {len(samples.test)} to test on")
        found += [f"site {site}: {federation.note}"] if federation.note else []
    if data:
        found.append(_dry_round(setting, dict(enumerate(data.values()))))
    elif with_data:
        found.append("no site has a folder here: no data and no round were tried")
    else:
        found.append("data are left out: no round was tried")
    return found


def _dry_round(setting: Setting, data: dict[int, ClientData]) -> str:
    """Play a round of one epoch with the sites whose data are here, and score the models."""
    quick = replace(setting, training=replace(setting.training, local_epochs=1))
    n = len(data)
    state = quick.algorithm.init(quick.spec.read(quick.template), n, stream(quick.seed, "init"))
    server = Server(state, Ledger(quick.spec.names), coding=quick.coding)
    with contextlib.closing(SimulatedFleet(quick, data, local_pool(quick, data, 0))) as fleet:
        refused = run_round(quick.algorithm, server, fleet, range(n))
        evaluate(quick.algorithm, server.state, fleet, n, server.t, server.coding)
    if refused:
        raise RunError("; ".join(refused.values()))
    down, up = server.ledger.down / n, server.ledger.up / n
    return f"a round of one epoch works: {down / 1e6:.3g} MB down and {up / 1e6:.3g} MB up for each site"
