from __future__ import annotations

import numpy as np
import torch

from pfedla.algorithms import FedAvg, Scaffold
from pfedla.algorithms.scaffold import Controlled, next_control
from pfedla.rounds import run_round
from pfedla.wire import Payload
from tests.world import by_hand, data, download, fleet_of, server_of, setting, task_of, theta_of


def test_next_control_by_hand() -> None:
    """c_i - c + (x - y)/(K lr): 1 - 3 + (5 - 4)/(2 0.25) = 0 and 2 - 3 + (5 - 7)/(4 0.25) = -3."""
    x, y = {"fc": torch.tensor([[5.0], [5.0]])}, {"fc": torch.tensor([[4.0], [7.0]])}
    mine, server = {"fc#control": torch.tensor([[1.0], [2.0]])}, {"fc#control": torch.tensor([[3.0], [3.0]])}
    found = next_control(mine, server, x, y, torch.tensor([[2.0], [4.0]]), 0.25)
    assert found["fc#control"].tolist() == [[0.0], [-3.0]]


def test_the_server_moves_by_unweighted_means() -> None:
    """Two of N = 4 clients: x + 0.5 (1 + 3)/2 = 2 and c + (2 + 6)/4 = 3; statistics take the plain mean."""
    one = torch.tensor([[1.0]])
    state = Controlled({"fc": one.clone(), "fc#stats": one.clone()}, {"fc#control": one.clone()}, torch.tensor(4))
    delta = torch.tensor([[1.0], [3.0]])
    layers = {"fc": delta, "fc#stats": delta, "fc#control": 2 * delta}
    upload = Payload.of(layers, torch.ones(2, 1, dtype=torch.bool), ["fc"], examples=torch.tensor([1, 9]))
    algorithm, ids = Scaffold(server_lr=0.5), torch.tensor([0, 3])
    state = algorithm.update(state, ids, algorithm.download(state, ids), upload)
    assert [float(x) for x in (*state.theta.values(), *state.control.values())] == [2, 3, 3]


def test_a_round_is_the_algorithm_of_the_paper() -> None:
    lr = 0.1
    made = setting(Scaffold(), "mlp", lr=lr)
    theta, state = theta_of(made), server_of(made, 3).state
    for row in state.control.values():
        row += 0.3
    own = {key: row + 0.1 if "#" in key else row for key, row in made.algorithm.enroll(theta).items()}
    task = task_of(made, [1])
    batches, gradient = by_hand(task, theta)
    x = task.model.vector(theta).numpy()
    y, c_i, c = x, np.float32(0.1), np.float32(0.3)
    for batch in batches:
        y = y - np.float32(lr) * (gradient(y, batch) - c_i + c)
    control = c_i - c + (x - y) / (len(batches) * lr)
    kept, upload = made.algorithm.train(own, made.algorithm.download(state, torch.tensor([1])), task)
    vector = task.model.vector
    np.testing.assert_allclose(vector(kept).numpy(), y, atol=1e-6)
    np.testing.assert_allclose(vector(kept, kind="control").numpy(), control, atol=1e-5)
    np.testing.assert_allclose(vector(upload.layers).numpy(), y - x, atol=1e-6)
    np.testing.assert_allclose(vector(upload.layers, kind="control").numpy(), control - c_i, atol=1e-5)
    assert np.abs(control - c_i).max() > 0.1


def test_the_servers_control_is_the_mean_of_all_clients() -> None:
    made = setting(Scaffold())
    server, fleet = server_of(made, 5), fleet_of(made, data(5))
    for ids in ([0, 1], [1, 2, 4], [0, 4], [1, 2]):  # client 3 never takes part
        run_round(made.algorithm, server, fleet, ids)
        for key, c in server.state.control.items():
            torch.testing.assert_close(c[0], fleet.kept.own[key].mean(0), rtol=0, atol=1e-5)
    assert not fleet.kept.own["fc#control"][3].any()
    assert float(server.state.control["fc#control"].abs().max()) > 1e-2


def test_the_first_round_trains_as_fedavg_and_controls_double_the_traffic() -> None:
    uploads, downloads, kept = [], [], []
    for algorithm in (Scaffold(), FedAvg()):
        made = setting(algorithm, weight_decay=0.01)
        ids, got = [0, 2], download(made, [0, 2])
        own = {key: row.repeat(2, 1) for key, row in made.enroll().own.items()}
        trained, upload = made.algorithm.train(own, got, task_of(made, ids))
        kept.append(trained)
        downloads.append(got.layer_bytes())
        uploads.append(upload.layer_bytes())
    assert all(torch.equal(kept[0][key], rows) for key, rows in kept[1].items())
    controls = [made.spec.size(name) * 4 for name in made.spec.names]
    for with_control, without in (downloads, uploads):
        assert (with_control - without).tolist() == [controls, controls]
