"""FedAvg in Flower's simulation, a round for each turn: `python -m benchmarks.peer_flower CLIENTS IMAGES EPOCHS`."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from benchmarks import turns
from benchmarks.work import LeNet, Work, train

client_app = ClientApp()
server_app = ServerApp()


@cache
def client_data(task: Work, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's data, kept by the worker from round to round."""
    torch.set_num_threads(1)
    return task.tensors(client)


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    """Train the received model on a client's data."""
    config: Any = message.content["config"]
    task = Work(images=config["images"], epochs=config["epochs"])
    x, y = client_data(task, int(context.node_config["partition-id"]))
    model = LeNet(task.shape, task.classes, task.batch_norm)
    arrays: Any = message.content["arrays"]
    model.load_state_dict(arrays.to_torch_state_dict())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train(model, x, y, task)
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class InTurns(FedAvg):
    """FedAvg that waits for its turn before each round."""

    def configure_train(self, *arguments: Any) -> Any:
        """Wait, then choose and instruct the clients."""
        if not turns.wait():
            raise SystemExit
        return super().configure_train(*arguments)

    def aggregate_train(self, *arguments: Any) -> Any:
        """Average, then say that the round is over."""
        averaged = super().aggregate_train(*arguments)
        if averaged[0] is None:
            raise RuntimeError("no client answered")
        turns.done()
        return averaged


@server_app.main()
def serve(grid: Grid, context: Context) -> None:  # noqa: ARG001
    """Run rounds as long as there are turns."""
    clients, images, epochs = map(int, sys.argv[1:4])
    task = Work()
    start = ArrayRecord(LeNet(task.shape, task.classes, task.batch_norm).state_dict())
    strategy = InTurns(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.start(grid, start, num_rounds=10**6, train_config=ConfigRecord({"images": images, "epochs": epochs}))


def main() -> None:
    """Run the simulation: two workers, a core each."""
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    backend = {"init_args": {"num_cpus": 2}, "client_resources": resources}
    run_simulation(server_app, client_app, num_supernodes=int(sys.argv[1]), backend_config=backend)


if __name__ == "__main__":
    from benchmarks import peer_flower  # workers find its functions under this name, not in __main__

    peer_flower.main()
