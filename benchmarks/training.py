"""Sample passes a second of whole rounds, against bare PyTorch loops on the same cores.

10 clients x 420 images x 10 epochs (and x 1), mini-batches of 32: LeNet with batch norm on 3x32x32, and without on
1x28x28. A round of ours is pFedLA's download, training, upload and update. The bare loop is what one writes by hand:
one process per core with one thread, data in memory as floats, channels-last, `torch.optim.SGD`, no server at all; once
with the model as one writes it (ReLU before the pooling), once with the `LeNet` of `pfedla.models` (ReLU after it, the
same function on a quarter of the values). All take turns; medians are compared.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks import work
from benchmarks.federation import Federation
from benchmarks.measuring import Row, in_turns
from benchmarks.work import BareLoop, Work
from pfedla import PFedLA
from pfedla.models import LeNet
from pfedla.pool import available_cores

__all__ = ["measure"]

MODELS = {
    "LeNet+BN, 3x32x32": Work(),
    "LeNet, 1x28x28": Work(shape=(1, 28, 28), batch_norm=False),
}


def measure(quick: bool) -> list[Row]:
    """Return a line for each model and number of local epochs."""
    rows = []
    for name, usual in MODELS.items():
        for epochs, repeats in ((1, 1),) if quick else ((10, 3), (1, 9)):
            task = replace(usual, epochs=epochs)
            if quick:
                task = replace(task, clients=2, images=40)
            rows.append({"model": name, "local epochs": epochs, **compare(task, repeats)})
    return rows


def compare(task: Work, repeats: int) -> Row:
    """Return sample passes a second of ours and of both bare loops, and our ratios to them."""
    workers = available_cores()
    kind = task.shape, task.classes, task.batch_norm
    user, ours = (BareLoop(task, partial(model, *kind), workers) for model in (work.LeNet, LeNet))
    federation = Federation(task, PFedLA(), workers)
    took = in_turns({"user": user.round, "ours": ours.round, "pfedla": federation.round}, repeats)
    for contestant in (user, ours, federation):
        contestant.close()
    return {
        "passes/s": round(task.passes / took["pfedla"]),
        "bare loop, passes/s": round(task.passes / took["user"]),
        "bare loop with our LeNet, passes/s": round(task.passes / took["ours"]),
        "ratio to bare loop": round(took["user"] / took["pfedla"], 3),
        "ratio with our LeNet": round(took["ours"] / took["pfedla"], 3),
    }
