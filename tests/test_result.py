"""What a finished run says: its summary, its weights, its models."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pfedla
from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedAvg, Local, PFedLA, PFedLAPeers
from pfedla.errors import ConfigError
from pfedla.result import Result
from pfedla.rounds import evaluate
from pfedla.training import Samples, Training
from tests.world import data, net

N = 4


def parts(samples: Samples) -> tuple[Tensor, Tensor]:
    return samples.take(slice(0, len(samples)), like=torch.empty(0))


def result_of(algorithm: Algorithm[Any], **keywords: Any) -> Result:
    """Run a method with the public function, in this process."""
    clients = [(*parts(mine.train), *parts(mine.test)) for mine in data(N, test_seed=9).values()]
    schedule = {"rounds": 6, "participants": 3, "eval_every": 2, **keywords}
    training = Training(local_epochs=2, batch_size=4, lr=0.05)
    return pfedla.run(algorithm, net, clients, training=training, workers=0, **schedule)


def test_the_summary_is_the_final_rounds_even_if_an_earlier_was_better(monkeypatch: pytest.MonkeyPatch) -> None:
    def worse_by_the_round(*arguments: Any) -> Any:
        scores = evaluate(*arguments)
        accuracy = np.array([9, 8, 8, 7.0]) / 10 / arguments[4]  # the round
        return scores._replace(personalized={**scores.personalized, "accuracy": accuracy})

    monkeypatch.setattr("pfedla.rounds.evaluate", worse_by_the_round)
    result = result_of(FedAvg())
    assert [record["round"] for record in result.history] == [2, 4, 6]
    assert result.summary["accuracy_mean"] == pytest.approx(0.8 / 6)
    assert result.summary["accuracy_worst"] == pytest.approx(0.7 / 6)
    assert result.summary["accuracy_std"] == pytest.approx(np.std([0.9, 0.8, 0.8, 0.7]) / 6)
    assert (result.summary["best_round"], result.summary["best_round_accuracy_mean"]) == (2, pytest.approx(0.4))


def test_the_summary_names_what_was_run_and_measured() -> None:
    result = result_of(Local(), seed=7)
    named = {"algorithm": "local", "dataset": "own data", "clients": N, "rounds": 6, "seed": 7}
    assert {key: result.summary[key] for key in named} == named
    assert (result.summary["headline"], result.summary["higher_is_better"], result.summary["percent"]) == (
        "accuracy",
        True,
        True,
    )
    measured = {"accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_after_training", "loss_mean"}
    assert measured <= set(result.summary)
    assert {"bytes_down", "bytes_up", "seconds", "samples_per_second"} <= set(result.summary)
    assert result.summary["bytes_down"] == result.summary["bytes_up"] == 0
    assert result.summary["overhead_down"] == result.ledger.overhead_down > 0
    assert result.summary["overhead_up"] == result.ledger.overhead_up > 0
    assert (result.alpha, result.final_alpha) == (None, None)
    assert json.loads(json.dumps(result.summary)) == result.summary


def test_weights_are_those_over_the_rounds_and_the_last_of_them() -> None:
    result = result_of(PFedLA())
    assert result.alpha is not None
    assert result.final_alpha is not None
    assert result.alpha.shape == (3, N, 3, N)
    assert np.array_equal(result.alpha, result.diagnostics["alpha"])
    assert np.array_equal(result.final_alpha, result.alpha[-1])
    np.testing.assert_allclose(result.alpha.sum(-1), 1, rtol=1e-5)


def test_weights_on_candidates_are_spread_over_everybody() -> None:
    result = result_of(PFedLAPeers(peers=2, refresh=2))
    alpha, candidates = result.diagnostics["alpha"], result.diagnostics["candidates"]
    assert result.alpha is not None
    assert result.final_alpha is not None
    assert (alpha.shape, result.alpha.shape) == ((3, N, 3, 3), (3, N, 3, N))
    for record, client, layer in np.ndindex(3, N, 3):
        expected = np.zeros(N)
        expected[candidates[record, client]] = alpha[record, client, layer]
        np.testing.assert_allclose(result.alpha[record, client, layer], expected, rtol=1e-6)
    assert np.array_equal(result.final_alpha, result.alpha[-1])
    np.testing.assert_allclose(result.alpha.sum(-1), 1, rtol=1e-5)


def test_a_clients_model_is_its_personalized_one() -> None:
    result, clients = result_of(PFedLA()), data(N, test_seed=9)
    assert result.template is not None
    assert result.spec is not None
    for client, accuracy in enumerate(result.history[-1]["clients"]["accuracy"]):
        model = result.model(client)
        x, y = parts(clients[client].test)
        assert float((model(x).argmax(1) == y).double().mean()) == pytest.approx(accuracy, abs=1e-6)
        state = copy.deepcopy(result.template)
        result.spec.write(state, result.personalized, client)
        assert torch.equal(state.eval()(x), model(x))
        assert torch.equal(result.model(f"client-{client}")(x), model(x))
    for number in (-1, N):
        with pytest.raises(ConfigError, match="clients are numbered from 0 to 3"):
            result.model(number)
    with pytest.raises(ConfigError, match="unknown client 'client-9': did you mean"):
        result.model("client-9")


def test_models_that_were_not_kept_are_said_to_be_so() -> None:
    result = result_of(FedAvg(), rounds=1, keep_models=False)
    assert result.personalized == {}
    with pytest.raises(ConfigError, match=r"not kept: set machine\.keep_models to true"):
        result.model(0)
