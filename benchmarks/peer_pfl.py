"""FedAvg in pfl, a round for each turn: `python -m benchmarks.peer_pfl CLIENTS IMAGES EPOCHS MEMORY_FORMAT`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks import turns, work
from benchmarks.work import Work


class LeNet(work.LeNet):
    """The same model, with the loss and the metrics that pfl asks of it."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a batch's loss."""
        self.train()
        return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Return what an evaluation reports."""
        self.eval()
        return {"loss": Weighted(float(nn.functional.cross_entropy(self(x), y, reduction="sum")), len(y))}


class InTurns(TrainingProcessCallback):
    """Waits for the next turn after each round."""

    def on_train_begin(self, **_: object) -> Any:
        """Wait for the first turn."""
        turns.wait()
        return Metrics()

    def after_central_iteration(self, *_: object, **__: object) -> Any:
        """Say that the round is over; stop if there is no other."""
        turns.done()
        return not turns.wait(), Metrics()


def main() -> None:
    """Run rounds as long as there are turns."""
    clients, images, epochs = map(int, sys.argv[1:4])
    channels_last = sys.argv[4] == "channels_last"
    torch.set_num_threads(1)
    task = Work(clients=clients, images=images, epochs=epochs)
    model = LeNet(task.shape, task.classes, task.batch_norm)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data = {client: task.tensors(client, channels_last=channels_last) for client in range(clients)}
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(data[user]), get_user_sampler("minimize_reuse", list(range(clients)))
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6, evaluation_frequency=10**6, train_cohort_size=clients, val_cohort_size=None
        ),
        SimulatedBackend(users, users),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        NNTrainHyperParams(local_batch_size=task.batch, local_num_epochs=epochs, local_learning_rate=task.lr),
        callbacks=[InTurns()],
    )


if __name__ == "__main__":
    main()
