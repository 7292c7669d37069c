from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from pfedla.algorithms import FedAvg
from pfedla.engine import FlatModel
from pfedla.errors import ConfigError, RunError
from pfedla.layers import LayerSpec
from pfedla.randomness import stream
from pfedla.training import EVALUATION_BATCH, Samples, Task, Training, score
from tests import world
from tests.world import setting, task_of, theta_of

LIKE = torch.empty(0)  # a model in single precision on the CPU


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_fit_is_a_bare_loop_of_torch(momentum: float, weight_decay: float) -> None:
    made = setting(FedAvg(), "mlp", momentum=momentum, weight_decay=weight_decay, local_epochs=3)
    client, t = 1, 4
    task = task_of(made, [client], t)
    trained = task.fit(theta_of(made))
    module, samples = copy.deepcopy(made.template), world.samples(7)[client]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay)
    order = stream(made.seed, "batches", t, client)
    for _ in range(3):
        for index in torch.randperm(len(samples), generator=order).split(4):
            x, y = samples.take(index, LIKE)
            optimizer.zero_grad()
            functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    for key, rows in made.spec.read(module).items():
        torch.testing.assert_close(trained[key], rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "size", "batches"), [(9, 4, [4, 5]), (8, 4, [4, 4]), (10, 4, [4, 4, 2]), (1, 4, [1]), (3, 8, [3])]
)
def test_a_last_batch_of_one_joins_the_one_before(count: int, size: int, batches: list[int]) -> None:
    made = setting(FedAvg(), "mlp", batch_size=size, local_epochs=2)
    samples = Samples(np.arange(count, dtype=np.float32)[:, None], np.zeros(count, dtype=np.int64))
    task = Task(FlatModel(copy.deepcopy(made.template), made.spec), [samples], [0], made.training, 0, 1)
    seen = [x[:, 0].tolist() for x, _ in task._batches(0, 2, "")]
    assert [len(batch) for batch in seen] == batches * 2
    for epoch in (seen[: len(batches)], seen[len(batches) :]):
        assert sorted(x for batch in epoch for x in batch) == list(range(count))


def test_batches_depend_on_seed_round_client_and_part_alone() -> None:
    made = setting(FedAvg(), "mlp")  # without dropout, which draws by itself
    start = theta_of(made)
    twice = {key: rows.repeat(2, 1) for key, rows in start.items()}
    alone, after_another = task_of(made, [2]).fit(start), task_of(made, [0, 2]).fit(twice)
    assert all(torch.equal(alone[key][0], after_another[key][1]) for key in start)
    other_seed = setting(FedAvg(), "mlp", seed=4)
    others = [task_of(made, [2], t=2).fit(start), task_of(other_seed, [2]).fit(start)]
    others.append(task_of(made, [2]).fit(start, part="finetune"))
    renamed = task_of(made, [2])
    renamed.ids = [5]  # the same samples as another client's
    for other in (*others, renamed.fit(start)):
        assert not torch.equal(alone["fc2"], other["fc2"])


def test_training_draws_dropout_from_its_own_address() -> None:
    made = setting(FedAvg())
    start = theta_of(made)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = task_of(made, [0]).fit(start)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(torch.equal(rows, one[key]) for key, rows in task_of(made, [0]).fit(start).items())


def test_what_training_draws_depends_on_seed_round_client_and_part_alone() -> None:
    made, other = setting(FedAvg(), "mlp"), setting(FedAvg(), "mlp", seed=4)

    def drawn(task: Task, part: str = "") -> list[float]:
        found: list[float] = []
        start = {key: rows.repeat(len(task.ids), 1) for key, rows in theta_of(made).items()}
        task.each(start, lambda *_: found.append(float(torch.rand(()))), part=part)
        return found

    alone = drawn(task_of(made, [2]))
    assert drawn(task_of(made, [0, 2]))[1:] == alone
    others = [task_of(other, [2]), task_of(made, [2], t=2), task_of(made, [3])]
    values = [alone, drawn(task_of(made, [2]), "finetune"), *map(drawn, others)]
    assert len({value for (value,) in values}) == 5


def test_a_task_is_split_by_seed_key_and_client_alone() -> None:
    made = setting(FedAvg())

    def values(task: Task, row: int) -> list[float]:
        return [float(x.sum()) for x in task.samples[row].take(slice(None), torch.zeros(1))[0]]

    whole = task_of(made, [2, 5], t=1)  # of 9 and 12 samples
    first, rest = whole.split(0.3, "part")
    for row, size in ((0, 3), (1, 4)):
        assert len(first.samples[row]) == size
        assert sorted(values(first, row) + values(rest, row)) == sorted(values(whole, row))
    alone = task_of(made, [5], t=9).split(0.3, "part")[0]
    assert values(alone, 0) == values(first, 1)
    assert values(alone, 0) != values(whole.split(0.3, "other")[0], 1)
    everything, again = whole.split(1.0, "part")
    assert values(everything, 0) == values(again, 0)
    assert len(whole.split(0.001, "part")[0].samples[0]) == 1


def test_divergence_names_client_and_round() -> None:
    made = setting(FedAvg(), "mlp", lr=1e30)
    with pytest.raises(RunError, match=r"diverged at client 3 in round 9.*Lower training\.lr \(now 1e\+30\)"):
        task_of(made, [3], t=9).fit(theta_of(made))


def test_images_of_bytes_are_scaled_and_others_are_not() -> None:
    pixels = np.array([0, 51, 255], dtype=np.uint8).reshape(1, 3, 1, 1)
    x, y = Samples(pixels, np.array([1])).take(slice(0, 1), LIKE)
    torch.testing.assert_close(x.flatten(), torch.tensor([-1.0, -0.6, 1.0]))
    assert x.shape == (1, 3, 1, 1)
    assert y.dtype == torch.int64
    x, _ = Samples(np.array([[3.0, 300.0]]), np.array([0])).take(slice(0, 1), LIKE)
    assert x.dtype == torch.float32
    assert x.tolist() == [[3.0, 300.0]]
    for codes in (
        np.array([[0, 1, 255]], np.uint8),
        torch.tensor([[0, 1, 255]], dtype=torch.uint8),
    ):  # no images
        x, _ = Samples(codes, np.array([0])).take(slice(0, 1), LIKE)
        assert (x.dtype, x.tolist()) == (torch.float32, [[0, 1, 255]])
    x, _ = Samples(torch.tensor([[3, 7]]), torch.tensor([0])).take(slice(0, 1), LIKE)
    assert x.dtype == torch.int64


def test_targets_come_as_they_are_in_the_models_precision() -> None:
    x, like = np.zeros((2, 3), dtype=np.float32), torch.empty(0, dtype=torch.float64)
    for targets, dtype in (
        (np.array([[0.1, 0.2], [0.3, 0.4]]), torch.float64),
        (np.array([3, 250], dtype=np.uint8), torch.int64),
        (np.array([[1, -100], [0, 2]], dtype=np.int32), torch.int64),
    ):
        samples = Samples(x, targets)
        found = samples.take(torch.tensor([1, 0]), like)[1]
        assert found.dtype == dtype
        np.testing.assert_allclose(found.numpy(), targets[::-1].astype(np.float32))
        assert samples.targets.shape == targets.shape


def test_images_come_back_in_their_shape() -> None:
    x = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
    samples = Samples(x, torch.tensor([2, 0]))
    assert torch.equal(samples.take(torch.tensor([1, 0]), LIKE)[0], x[[1, 0]])
    assert len(samples) == 2
    assert samples.targets.tolist() == [2, 0]


def test_scores_are_the_share_of_right_answers_and_the_mean_loss() -> None:
    module = nn.Linear(2, 2, bias=False)
    spec = LayerSpec.of(module)
    rows = {"(root)": torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])}  # logits = x, and x reversed
    x, y = np.array([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [4.0, 0.0]]), np.array([0, 1, 0, 0])
    samples = Samples(x.astype(np.float32), y)
    found = score(FlatModel(module, spec), rows, [samples, samples])
    for row, logits in enumerate((x, x[:, ::-1])):
        losses = [np.log(np.exp(z).sum()) - z[label] for z, label in zip(logits, y, strict=True)]
        assert found["loss"][row] == pytest.approx(np.mean(losses), rel=1e-6)
    assert found["accuracy"].tolist() == [0.75, 0.25]


def test_scores_do_not_depend_on_batches_and_leave_statistics_alone() -> None:
    made = setting(FedAvg())
    rng = np.random.default_rng(0)
    count = EVALUATION_BATCH + 7
    many = Samples(rng.normal(size=(count, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, count))
    model, layers = FlatModel(copy.deepcopy(made.template), made.spec), theta_of(made)
    found = score(model, layers, [many])
    with torch.no_grad():
        x, y = many.take(slice(0, count), LIKE)
        logits = copy.deepcopy(made.template).eval()(x)
    assert found["accuracy"][0] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert found["loss"][0] == pytest.approx(float(functional.cross_entropy(logits, y)), rel=1e-5)
    assert all(torch.equal(rows, layers[key]) for key, rows in model.read().items())


def test_without_test_samples_there_is_no_score() -> None:
    made, some = setting(FedAvg(), "mlp"), world.samples(1)[0]
    none = Samples(np.zeros((0, 2, 6, 6), dtype=np.float32), np.zeros(0, dtype=np.int64))
    model, theta = FlatModel(copy.deepcopy(made.template), made.spec), theta_of(made)
    twice = {key: rows.repeat(2, 1) for key, rows in theta.items()}
    for layers, tests in ((theta, [none]), (twice, [none, some])):
        found = score(model, layers, tests)
        assert list(found) == ["accuracy", "loss"]
        for values in found.values():
            assert np.isnan(values).tolist() == [True, False][: len(tests)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"local_epochs": 0}, "local_epochs = 0 must be at least 1"),
        ({"batch_size": 0}, "batch_size = 0 must be at least 1"),
        ({"lr": 0.0}, r"lr = 0\.0 must be above 0"),
        ({"momentum": 1.0}, r"momentum = 1\.0 must be at least 0 and below 1"),
        ({"weight_decay": -1.0}, r"weight_decay = -1\.0 must be at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^training\.{message}$"):
        Training(**wrong)


# ---- the statistics of a model on a client's data


def test_running_statistics_are_those_of_all_training_samples_and_nothing_else_changes() -> None:
    made = setting(FedAvg())
    task, start = task_of(made, [0, 2]), theta_of(made)
    models = {key: torch.cat([rows, rows * 2 if rows.is_floating_point() else rows]) for key, rows in start.items()}
    found = task.normalized(models)
    for row, samples in enumerate(task.samples):
        module = copy.deepcopy(made.template)
        made.spec.write(module, models, row)
        inputs = module.get_submodule("conv")(samples.take(slice(None), LIKE)[0])
        values = inputs.transpose(0, 1).flatten(1)  # (channels, samples and places)
        expected = torch.cat([values.mean(1), values.var(1)]).detach()
        torch.testing.assert_close(found["bn#stats"][row], expected, rtol=1e-4, atol=1e-6)
    assert found.keys() == models.keys()
    for key in models.keys() - {"bn#stats"}:
        assert found[key] is models[key]
    norm = task.model.module.get_submodule("bn")
    assert norm.momentum == 0.1
    assert task.fit(models)["bn#counters"].tolist() == [[4], [4]]  # training counts its batches as ever


@pytest.mark.parametrize(
    "make",
    [nn.BatchNorm1d, partial(nn.InstanceNorm1d, affine=True, track_running_stats=True)],
    ids=["batch", "instance"],
)
@pytest.mark.parametrize("count", [EVALUATION_BATCH - 10, EVALUATION_BATCH + 10, 4 * EVALUATION_BATCH])
def test_running_statistics_do_not_depend_on_the_order_of_the_samples(make: Any, count: int) -> None:
    rng, y = np.random.default_rng(0), np.arange(count) * 2 // count  # one class after the other
    x = (rng.normal(size=(count, 1, 6)) + 10 * y[:, None, None]).astype(np.float32)
    module = nn.Sequential(make(1), nn.Flatten(), nn.Linear(6, 2))
    spec = LayerSpec.of(module)
    task = Task(FlatModel(module, spec), [Samples(x, y)], [0], Training(), seed=0, t=1)
    mean, variance = task.normalized(spec.read(module))["0#stats"][0].tolist()
    within = x.var(2, ddof=1).mean() if isinstance(module[0], nn.InstanceNorm1d) else x.var(ddof=1)
    assert mean == pytest.approx(x.mean(), rel=0.15)
    assert variance == pytest.approx(within, rel=0.02)


def test_where_there_are_norms_nothing_is_trained_on_one_sample_while_there_are_more() -> None:
    x, y = np.zeros((2, 2, 6, 6), np.float32), np.arange(2)
    for name, least in (("conv", 2), ("mlp", 1)):
        made = setting(FedAvg(), name)
        task = Task(FlatModel(made.template, made.spec), [Samples(x, y)], [0], made.training, seed=0, t=1)
        assert task.has_folds(5) == (least == 1)
        assert [len(part.samples[0]) for part in task.split(0.2, "held out")] == [1, least]


def test_a_model_without_such_norms_is_left_alone() -> None:
    made = setting(FedAvg(), "mlp")
    task, start = task_of(made, [0]), theta_of(made)
    task.model.module.register_forward_hook(lambda *_: pytest.fail("a pass for nothing"))
    assert task.normalized(start) is start


def test_dropout_rests_while_statistics_are_taken() -> None:
    made = setting(FedAvg())
    task, start = task_of(made, [1]), theta_of(made)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    task.normalized(start)
    assert torch.equal(torch.random.get_rng_state(), before)
