from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pfedla
from pfedla import FedAvg, PFedLA, Privacy, Training
from pfedla.algorithm import Algorithm
from pfedla.algorithms import FedBN, FedFomo, PFedLAX, Scaffold
from pfedla.algorithms.pfedla_x import Judged
from pfedla.client import Job, Runtime, Setting
from pfedla.codec import Codec
from pfedla.config import Experiment
from pfedla.errors import ConfigError, RunError
from pfedla.experiment import assemble
from pfedla.layers import STATS, kind_of
from pfedla.privacy import clipped, epsilon, normal_of, private, statement, system_normal
from pfedla.randomness import stream
from pfedla.wire import EXAMPLES, Payload
from tests.world import METHODS, data, download, net, same_result, setting


def trained(made: Setting, client: int = 0) -> Payload:
    """Return what a client uploads in the first round, unpacked."""
    job = Job("train", client, 1, made.enroll(), download(made, [client]))
    return made.coding.unpack(Runtime(made, data(4)).train(job)[1], "up")


def change_of(upload: Payload) -> np.ndarray:
    """Return the changes of the trained parameters as one vector."""
    return np.concatenate([rows.numpy().ravel() for key, rows in upload.layers.items() if not kind_of(key)])


def private_setting(algorithm: Algorithm[Any], name: str = "mlp", *, deployed: bool = False, **how: float) -> Setting:
    return replace(setting(algorithm, name), privacy=Privacy(**how), deployed=deployed)


# ---- clipping and noise


def test_a_long_change_is_shortened_and_a_short_one_is_not() -> None:
    change = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([[0.0, 4.0]])}  # of length 5
    short = clipped(change, 2.0)
    np.testing.assert_allclose(short["a"].numpy(), [[1.2, 0.0]])
    np.testing.assert_allclose(short["b"].numpy(), [[0.0, 1.6]])
    for key, rows in clipped(change, 5.1).items():
        assert torch.equal(rows, change[key].double())
    zero = clipped({"a": torch.zeros(1, 3)}, 1.0)["a"]
    assert torch.equal(zero, torch.zeros(1, 3, dtype=torch.float64))


def test_an_upload_is_as_long_as_clip_allows() -> None:
    plain = change_of(trained(setting(PFedLA(), "mlp")))
    assert np.linalg.norm(plain) > 0.1
    short = change_of(trained(private_setting(PFedLA(), clip=0.1)))
    np.testing.assert_allclose(np.linalg.norm(short), 0.1, rtol=1e-5)
    np.testing.assert_allclose(short, plain * 0.1 / np.linalg.norm(plain), rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(change_of(trained(private_setting(PFedLA(), clip=1e3))), plain)


def test_noise_has_the_deviation_that_is_asked_for() -> None:
    rows = torch.zeros(1, 40_000)
    upload = Payload.of({"fc": rows}, torch.tensor([[True]]), ["fc"], examples=torch.tensor([7]))
    for normal in (normal_of(3, 1, 0), system_normal):
        noised = private(upload, Privacy(clip=0.5, noise=4.0), "FedAvg", normal).layers["fc"].numpy()
        assert noised.shape == (1, 40_000)
        assert abs(noised.std() / 2.0 - 1) < 0.02  # its own deviation is 0.0035
        assert abs(noised.mean()) < 0.05
        assert abs((np.abs(noised) < 2.0).mean() - 0.6827) < 0.012  # as much as lies within one deviation
        assert abs(np.corrcoef(noised[0, :20_000], noised[0, 20_000:])[0, 1]) < 0.04  # the halves of Box and Muller


def test_noise_is_the_same_again_in_a_simulation_and_never_in_a_deployment() -> None:
    simulated, real = (private_setting(PFedLA(), clip=1.0, noise=1.0, deployed=one) for one in (False, True))
    np.testing.assert_array_equal(change_of(trained(simulated)), change_of(trained(simulated)))
    assert not np.array_equal(change_of(trained(real)), change_of(trained(real)))
    rest = change_of(trained(simulated)) - change_of(trained(private_setting(PFedLA(), clip=1.0)))
    generator, sizes = stream(3, "noise", 1, 0), [simulated.spec.size(name) for name in simulated.spec.names]
    expected = torch.cat([torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes])
    np.testing.assert_allclose(rest, expected.numpy(), atol=1e-6)
    experiment = Experiment(PFedLA(), privacy=Privacy(clip=1.0, noise=1.0))
    assert assemble(experiment, lambda: net("mlp")).deployed


def test_without_the_option_nothing_changes() -> None:
    upload = trained(setting(FedAvg()))
    assert private(upload, Privacy(), "FedAvg", system_normal) is upload
    experiment = Experiment()
    assert experiment.tables()["privacy"] == {}  # an earlier run has the same settings, and can be resumed
    assert experiment.privacy.clip is None


def test_what_a_codec_makes_of_noise_is_owed_and_no_more() -> None:
    """The error that is fed back is that of the noised upload: it tells nothing else."""
    made = replace(setting(FedAvg(), "mlp", codec=Codec(up="int8")), privacy=Privacy(clip=0.1, noise=1.0))
    kept, packed = Runtime(made, data(4)).train(Job("train", 0, 1, made.enroll(), download(made, [0])))
    noised = trained(replace(made, codec=Codec()))
    sent = made.coding.unpack(packed, "up")
    for key, owed in kept.owed.items():
        torch.testing.assert_close(owed, noised.layers[key] - sent.layers[key])


# ---- what else would leave the client


def test_methods_declare_what_they_upload_beside_their_changes(algorithm: Algorithm[Any]) -> None:
    made = setting(algorithm)
    upload = trained(made)
    found = set(upload.values) - {EXAMPLES} | {kind_of(key) for key in upload.layers} - {"", STATS}
    assert found == set(made.algorithm.uploads_beside)


def test_of_every_method_only_clipped_changes_leave_the_client_or_it_is_refused(algorithm: Algorithm[Any]) -> None:
    if isinstance(algorithm, FedFomo | Judged | Scaffold):
        with pytest.raises(ConfigError, match=type(algorithm).__name__):
            private_setting(algorithm, clip=0.01)
        return
    upload = trained(private_setting(algorithm, "conv" if isinstance(algorithm, FedBN) else "mlp", clip=0.01))
    assert set(upload.values) <= {EXAMPLES}
    assert upload.values.get(EXAMPLES, torch.ones(1)).tolist() == [1]
    assert not any(kind_of(key) for key in upload.layers)
    if upload.layers:  # Local's has none
        assert np.linalg.norm(change_of(upload)) <= 0.01 * (1 + 1e-5)


def test_running_statistics_stay_at_the_client_or_the_method_is_refused() -> None:
    upload = trained(private_setting(PFedLA(), "conv", clip=1.0))
    assert not upload.layers["bn#stats"].any()
    assert trained(setting(PFedLA(), "conv")).layers["bn#stats"].any()
    with pytest.raises(ConfigError, match=r"privacy.clip: FedAvg uploads the running statistics of bn and needs them"):
        private_setting(FedAvg(), "conv", clip=1.0)
    private_setting(METHODS["fedbn"](), "conv", clip=1.0)  # keeps them


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [
        (FedFomo(), "FedFomo sends whole models"),
        (Scaffold(), "Scaffold uploads control"),
        (PFedLAX(), "PFedLAX uploads path, start, serve"),
        (PFedLA(hyper_optimizer="mean-sgd"), "PFedLA uploads path"),
    ],
)
def test_the_method_and_what_it_would_reveal_are_named(algorithm: Algorithm[Any], value: str) -> None:
    with pytest.raises(ConfigError, match=value):
        private_setting(algorithm, clip=1.0)


def test_a_value_that_a_method_does_not_declare_is_refused_when_it_is_uploaded() -> None:
    class Telling(FedAvg):
        def train(self, own: Any, got: Any, task: Any) -> Any:
            kept, upload = super().train(own, got, task)
            return kept, upload._replace(values={**upload.values, "mood": torch.ones(1)})

    with pytest.raises(ConfigError, match=r"privacy.clip: Telling uploads mood, which nothing here clips or noises"):
        trained(private_setting(Telling(), clip=1.0))


# ---- what it amounts to


def exact_epsilon(mu: float, delta: float) -> float:
    """Return the ε of a Gaussian mechanism by its exact δ(ε) (Balle and Wang, 2018), found by halving.

    δ = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), with μ = sensitivity / standard deviation.
    """

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def spent(e: float) -> float:
        return phi(mu / 2 - e / mu) - math.exp(e) * phi(-mu / 2 - e / mu)

    low, high = 0.0, 500.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


@pytest.mark.slow
@pytest.mark.parametrize(("uploads", "noise"), [(1, 20.0), (50, 20.0), (100, 40.0), (50, 8.0)])
def test_epsilon_is_that_of_composed_gaussian_mechanisms(uploads: int, noise: float) -> None:
    """Those of k uploads are one with √k times the sensitivity, twice clip; the library's bound is a little above."""
    pytest.importorskip("dp_accounting")
    found, exact = epsilon(uploads, noise, 1e-5), exact_epsilon(2 * math.sqrt(uploads) / noise, 1e-5)
    assert exact <= found <= 1.2 * exact
    renyi = min(
        uploads * a * 2 / noise**2 + math.log((a - 1) / a) - (math.log(1e-5) + math.log(a)) / (a - 1)
        for a in np.arange(1.01, 500, 0.01)
    )
    assert found == pytest.approx(renyi, rel=0.02)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def run(**settings: Any) -> pfedla.Result:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 3) for _ in range(3)]
    how: dict[str, Any] = {"rounds": 3, "workers": 0, "training": Training(1, 8), **settings}
    return pfedla.run(how.pop("algorithm", PFedLA()), model, clients, **how)


def test_a_run_says_what_it_guarantees() -> None:
    pytest.importorskip("dp_accounting")
    result = run(privacy=Privacy(clip=1.0, noise=20.0, delta=1e-3))
    summary = result.summary
    assert summary["epsilon"] == epsilon(3, 20.0, 1e-3)
    assert (summary["delta"], summary["uploads_per_client"]) == (1e-3, 3)
    assert summary["settings"]["privacy"] == {"clip": 1.0, "noise": 20.0, "delta": 1e-3}
    words = statement(summary)
    assert words is not None
    assert "each client's whole data" in words
    assert "3 uploads of a client at most" in words
    same_result(result, run(privacy=Privacy(clip=1.0, noise=20.0, delta=1e-3), workers=2))
    some = run(privacy=Privacy(clip=1.0, noise=20.0), participants=1).summary
    assert some["uploads_per_client"] == 2  # of the client that took part most often
    assert some["epsilon"] == epsilon(2, 20.0, 1e-5)


def test_clipping_alone_and_nothing_at_all_are_called_what_they_are() -> None:
    assert "no guarantee" in str(statement(run(privacy=Privacy(clip=1.0)).summary))
    assert statement(run(algorithm=pfedla.Local(), privacy=Privacy(clip=1.0)).summary) == (
        "privacy: no layer leaves a client"
    )
    plain = run().summary
    assert statement(plain) is None
    assert not {"epsilon", "delta", "uploads_per_client"} & plain.keys()


def test_noise_needs_a_bound_and_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"privacy.noise and privacy.delta mean nothing without privacy.clip"):
        Privacy(noise=1.0)
    with pytest.raises(ConfigError, match=r"privacy.clip = 0.0 must be above 0"):
        Privacy(clip=0.0)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(RunError, match=r"^privacy.noise needs its extra: pip install 'pfedla\[privacy\]'"):
        run(privacy=Privacy(clip=1.0, noise=1.0))


def test_the_command_line_prints_the_guarantee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pfedla: Any) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.chdir(tmp_path)
    small = ["--clients", "2", "--samples-per-client", "20", "--local-epochs", "1", "--model", "mlp", "--workers", "0"]
    noise = ["--set", "privacy.clip=1", "--set", "privacy.noise=10", "--rounds", "2"]
    code, out, _ = pfedla("run", *small, *noise, "--out", "one")
    assert code == 0
    found = json.loads(Path("one/summary.json").read_text())["epsilon"]
    assert f"privacy: epsilon {found:.4g} at delta 1e-05" in out
    code, out, _ = pfedla("compare", "-a", "local", "-a", "fedavg", *small, *noise, "--out", "two")
    assert code == 0
    assert "local: privacy: no layer leaves a client" in out
    assert f"fedavg: privacy: epsilon {found:.4g}" in out


def test_nobody_joins_a_run_with_noise(tmp_path: Path) -> None:
    run(privacy=Privacy(clip=1.0), out=tmp_path / "run")
    x = np.zeros((20, 4), np.float32)
    with pytest.raises(ConfigError, match=r"privacy.clip: a newcomer's gradients are not noised"):
        pfedla.join(tmp_path / "run", (x, np.arange(20) % 3), model=model)
