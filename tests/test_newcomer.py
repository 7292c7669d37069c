"""A client that joins a trained federation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import pfedla
from pfedla import Codec, FedAMP, FedAvg, HeurPFedLA, Local, PFedLA, PFedLAX, cli, load_model
from pfedla.algorithms.hypernetwork import hypernetwork
from pfedla.errors import ConfigError, DataError, RunError
from pfedla.models import MLP
from pfedla.newcomer import join
from pfedla.randomness import stream


def theta(n: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn(n, size, generator=rng) for name, size in (("fc1", 6), ("fc2", 4))}


def trained(n: int = 3, method: PFedLA | None = None) -> tuple[PFedLA, Any]:
    """Return pFedLA's state of clients whose models and weights differ."""
    method = method or PFedLA()
    state = method.init({key: rows[:1] for key, rows in theta(1).items()}, n, stream(0, "init"))
    for key, rows in theta(n).items():
        state.theta[key].copy_(rows)
    return method, state


def weights(state: Any) -> torch.Tensor:
    return hypernetwork(state.body.value, state.heads.value)


def test_the_others_keep_their_models_and_the_ratios_of_their_weights() -> None:
    method, state = trained()
    before = weights(state)
    models = {key: rows.clone() for key, rows in state.theta.items()}
    after = method.admit(state, stream(0, "join"))
    for key, rows in models.items():
        assert torch.equal(after.theta[key][:3], rows)
        torch.testing.assert_close(after.theta[key][3], rows.mean(0))
    alpha = weights(after)
    torch.testing.assert_close(alpha[:3, :, :3] / alpha[:3, :, :3].sum(-1, keepdim=True), before)
    torch.testing.assert_close(alpha[:3, :, 3], alpha[:3, :, :3].log().mean(-1).exp())
    torch.testing.assert_close(alpha[3], torch.full((2, 4), 0.25))
    assert after.body.steps.tolist() == [0] * 4
    assert len(after.heads.steps) == 4 * 2


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_direction_raises_the_weight_of_whoever_lies_there_by_at_most_a_step(by_layer: bool) -> None:
    method, state = trained()
    state = method.admit(state, stream(0, "join"))
    downhill = {key: rows[1:2] - rows[3:] for key, rows in state.theta.items()}  # from the mean lies client 1
    before = weights(state)
    others = before[:3].clone()
    after = method.attract(state, 3, downhill, 0.5, by_layer=by_layer)
    alpha = weights(after)
    assert (alpha[3].argmax(-1) == 1).all()
    shift = (alpha[3] / before[3]).log()
    shift -= shift.mean(-1, keepdim=True)
    largest = shift.abs().amax(-1)
    assert float(largest.max()) == pytest.approx(0.5, rel=1e-4)
    assert (float(largest.min()) == pytest.approx(0.5, rel=1e-4)) == by_layer
    torch.testing.assert_close(alpha[:3], others)


def test_models_that_are_all_alike_attract_nobody() -> None:
    method, state = trained()
    for rows in state.theta.values():
        rows[:] = rows[:1].clone()
    state = method.admit(state, stream(0, "join"))
    before = weights(state)
    for by_layer in (False, True):
        torch.testing.assert_close(weights(method.attract(state, 3, theta(1), 1.0, by_layer=by_layer)), before)


def groups(clients: int, seed: int = 0, samples: int = 60) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return clients of two hidden groups by turns, who call the same two clouds by opposite labels."""
    rng, made = np.random.default_rng(seed), []
    for client in range(clients):
        y = np.arange(samples) % 2
        x = (rng.normal(size=(samples, 5)) + 3 * y[:, None]).astype(np.float32)
        made.append((x, y if client % 2 else 1 - y))
    return made


def model() -> MLP:
    return MLP((5,), 2)


def federation(out: Path, algorithm: Any = None, **settings: Any) -> Path:
    training = pfedla.Training(local_epochs=3, lr=0.1)
    how = {"rounds": 12, "eval_every": 12, "workers": 0, "training": training, "out": out, **settings}
    pfedla.run(algorithm or PFedLA(hyper_optimizer="mean-sgd"), model, groups(4), **how)
    return out


def contents(path: Path) -> dict[str, str]:
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(path.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("who", [0, 1])
def test_gradients_find_the_group_before_any_training(who: int, tmp_path: Path) -> None:
    run = federation(tmp_path / "run")
    before = contents(run)
    client = groups(6, seed=5)[4 + who]
    found = join(run, client, name="new", rounds=2, gradients=10, model=model)
    blind = join(run, client, name="new", rounds=0, gradients=0, model=model)
    assert contents(run) == before
    assert [line["round"] for line in found.history] == [0, 1, 2]
    assert found.history[0]["accuracy"] > 0.9 > 0.8 > blind.history[0]["accuracy"]
    last = list(found.weights)[-1]
    own_group = sum(found.weights[last][f"client-{i}"] for i in range(4) if i % 2 == who)
    others = sum(found.weights[last][f"client-{i}"] for i in range(4) if i % 2 != who)
    assert own_group > 3 * others
    assert all(sum(row.values()) == pytest.approx(1, abs=1e-5) for row in found.weights.values())
    assert list(found.weights[last]) == [f"client-{i}" for i in range(4)] + ["new"]
    x, y = (torch.from_numpy(part) for part in client)
    with torch.inference_mode():
        assert (found.module(x).argmax(1) == y).float().mean() > 0.95
    found.save(tmp_path / "new.safetensors")
    again = load_model(tmp_path / "new.safetensors", model=model)
    torch.testing.assert_close(again(x), found.module(x))


@pytest.mark.parametrize("who", [0, 1])
def test_gradients_find_the_group_in_a_federation_of_pfedla_x(who: int, tmp_path: Path) -> None:
    run, client = federation(tmp_path / "run", PFedLAX()), groups(6, seed=5)[4 + who]
    found, blind = (join(run, client, name="new", rounds=4, gradients=k, model=model) for k in (10, 0))
    assert found.history[0]["accuracy"] > 0.85 > 0.75 > blind.history[0]["accuracy"]
    assert found.history[-1]["accuracy"] > 0.85
    last = list(found.weights)[-1]
    own_group = sum(found.weights[last][f"client-{i}"] for i in range(4) if i % 2 == who)
    assert own_group > 3 * sum(found.weights[last][f"client-{i}"] for i in range(4) if i % 2 != who)


def test_its_own_rounds_are_counted(tmp_path: Path) -> None:
    found = join(federation(tmp_path / "run"), groups(1)[0], rounds=2, gradients=1, model=model)
    down = [line["bytes_down"] for line in found.history]
    assert down[0] == 0 < down[1]
    assert down[2] == 2 * down[1]
    assert found.history[1]["bytes_up"] > 0


@pytest.mark.parametrize("algorithm", [HeurPFedLA(retain=2), FedAvg(), Local(), PFedLA(), PFedLAX()])
def test_methods_that_take_newcomers(algorithm: Any, tmp_path: Path) -> None:
    run = federation(tmp_path / "run", algorithm, codec=Codec(up="int8"))
    found = join(run, groups(1)[0], rounds=4, gradients=5, model=model)
    assert found.history[-1]["accuracy"] > 0.9
    assert bool(found.weights) == isinstance(algorithm, PFedLA | PFedLAX)


def test_layers_that_a_newcomer_would_retain_are_sent_before_its_first_round(tmp_path: Path) -> None:
    run = federation(tmp_path / "run", HeurPFedLA(retain=2, hyper_optimizer="mean-sgd"))
    plain = federation(tmp_path / "plain", PFedLA(hyper_optimizer="mean-sgd"))
    first, all_sent = (join(path, groups(1)[0], rounds=2, gradients=0, model=model).history for path in (run, plain))
    assert first[1]["bytes_down"] == all_sent[1]["bytes_down"]
    assert first[2]["bytes_down"] < all_sent[2]["bytes_down"]


def test_what_cannot_join_is_refused(tmp_path: Path) -> None:
    run, client = federation(tmp_path / "run"), groups(1)[0]
    with pytest.raises(ConfigError, match="came from Python"):
        join(run, client)
    with pytest.raises(ConfigError, match="has a client 'client-1' already"):
        join(run, client, name="client-1", model=model)
    with pytest.raises(DataError, match=r"inputs have the shape \(5,\), not \(4,\)"):
        join(run, (client[0][:, :4], client[1]), model=model)
    with pytest.raises(DataError, match="label 6 is none of the classes"):
        join(run, (client[0], client[1] + 6), model=model)
    with pytest.raises(ConfigError, match="must be at least 0"):
        join(run, client, rounds=-1, model=model)
    with pytest.raises(ConfigError, match="FedAMP has no place for a client that joins later"):
        join(federation(tmp_path / "amp", FedAMP()), client, model=model)
    (run / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match="has no checkpoint to join"):
        join(run, client, model=model)
    with pytest.raises(RunError):
        join(tmp_path / "nowhere", client, model=model)


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    folder.mkdir()
    for i, (x, y) in enumerate(groups(4)):
        np.savez(folder / f"site-{i}.npz", x=x, y=np.array([100, 110])[y])
    x, y = groups(1, seed=9)[0]
    np.savez(tmp_path / "new.npz", x=x, y=np.array([100, 110])[y])

    def invoke(*words: object) -> Any:
        return CliRunner().invoke(cli.cli, [str(word) for word in words], catch_exceptions=False)

    run, out = tmp_path / "run", tmp_path / "new.safetensors"
    algorithm = ("--set", "algorithm.hyper_optimizer=mean-sgd")
    assert invoke("run", "--folder", folder, "--rounds", 12, "--lr", 0.1, "--workers", 0, "--out", run, *algorithm)
    shown = invoke("join", run, "--data", tmp_path / "new.npz", "--rounds", 1, "-o", out)
    assert shown.exit_code == 0, shown.output
    assert "accuracy of new before its first round: " in shown.output
    assert "accuracy of new after 1 round: " in shown.output
    assert "fc1 is learned from " in shown.output
    assert load_model(out)(torch.from_numpy(x)).shape == (60, 2)
    as_json = invoke("join", run, "--data", tmp_path / "new.npz", "--rounds", 0, "--name", "x", "--json")
    assert json.loads(as_json.stdout)["history"][0]["round"] == 0


def test_a_place_that_cannot_hold_a_model_is_refused_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("pfedla.trained_commands.RunRecord", lambda _: SimpleNamespace(complete=True))
    for place, why in (("folder", "it is a folder"), ("none/model", "there is no folder")):
        words = ["join", str(tmp_path), "--data", "x.npz", "-o", str(tmp_path / place)]
        done = CliRunner().invoke(cli.cli, words)
        assert isinstance(done.exception, RunError)
        assert why in str(done.exception)
