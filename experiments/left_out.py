"""What pFedLA-X's layers know of samples that were left out of their latest training, against test samples.

A fold judges layers that were not trained on it for two rounds. Before that they were, and what they taught others then
comes back with the others' mixture.

    python -m experiments.left_out experiments/methods-fashion-mnist-non-iid-2.toml

Prints, every few rounds, means over clients: accuracy (%) and loss of the client's own model, of the others' mixture
and of the served model, on the fold that is about to judge and on the client's test samples. Everybody takes part.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from experiments.by_hand import arguments_of, started
from pfedla.algorithms import PFedLAX
from pfedla.engine import FlatModel
from pfedla.rounds import run_round
from pfedla.training import ClientData, Task, score
from pfedla.wire import Payload

__all__ = ["compared", "main"]

MODELS = ("own", "mixture", "served")


def main(arguments: list[str] | None = None) -> None:
    """Run the method and print a line every few rounds."""
    given = arguments_of(__doc__).parse_args(arguments)
    setting, federation, server, fleet, model = started(given.config, "pfedla-x", given.data_dir)
    n, method = len(federation.data), setting.algorithm
    assert isinstance(method, PFedLAX)
    if given.every % method.hold:
        raise SystemExit(f"--every must be a multiple of {method.hold}: then a fold's rounds are over")
    heads = [f"{name}, {on}" for name in MODELS for on in ("fold", "test")]
    sys.stdout.write(f"| round | {' | '.join(heads)} |\n|{'---|' * (1 + len(heads))}\n")
    for t in range(1, given.rounds + 1):
        run_round(method, server, fleet, range(n))
        if t % given.every == 0:
            found = []
            for i in range(n):
                own = {key: rows[[i]] for key, rows in fleet.kept.own.items()}
                got = method.download(server.state, torch.tensor([i]))
                task = Task(model, [federation.data[i].train], [i], setting.training, setting.seed, t + 1)
                found.append(compared(method, model, task, own, got, federation.data[i]))
            means = np.mean(found, 0)  # (models, fold or test, accuracy and loss)
            cells = [f"{100 * accuracy:.1f} / {loss:.2f}" for accuracy, loss in means.reshape(-1, 2)]
            sys.stdout.write(f"| {t} | {' | '.join(cells)} |\n")
            sys.stdout.flush()


def compared(
    method: PFedLAX, model: FlatModel, task: Task, own: dict[str, torch.Tensor], got: Payload, data: ClientData
) -> np.ndarray:
    """Return accuracy and loss of a client's models on its latest fold and on its test samples: `(3, 2, 2)`."""
    rest, fold = task.leave_out(method.folds, [int(own["#held"]) // method.hold - 1])
    rows = [own, rest.normalized(got.fill(own)), method.personalize(own, got, rest)]
    parts = (fold.samples[0], data.test)
    scores = [[score(model, layers, [samples]) for samples in parts] for layers in rows]
    return np.array([[[found["accuracy"][0], found["loss"][0]] for found in some] for some in scores])


if __name__ == "__main__":
    main()
