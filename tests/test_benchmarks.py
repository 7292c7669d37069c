from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import peers, scale, server, tables, work
from pfedla import PFedLA
from pfedla.algorithms import pfedla as equations
from pfedla.layers import LayerSpec
from pfedla.models import LeNet

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", command.USUAL)
def test_a_benchmark_writes_and_prints_lines_with_the_same_columns(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"older": {"rows": []}}))
    command.main([name, "--quick", "--json", str(path)])
    found = json.loads(path.read_text())
    assert found.keys() == {"older", name}
    assert {"commit", "torch", "cores", "threads", "seconds", "busy with other work"} < found[name].keys()
    rows = found[name]["rows"]
    assert rows
    assert all(row.keys() == rows[0].keys() for row in rows)
    numbers = [value for row in rows for value in row.values() if not isinstance(value, str)]
    assert numbers
    assert all(math.isfinite(number) for number in numbers)
    assert name in capsys.readouterr().out


@pytest.mark.parametrize(("shape", "batch_norm"), [((3, 32, 32), True), ((1, 28, 28), False)])
def test_the_model_of_the_bare_loop_is_the_same_function_as_ours(shape: tuple[int, int, int], batch_norm: bool) -> None:
    theirs, ours = work.LeNet(shape, 10, batch_norm), LeNet(shape, 10, batch_norm)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(8, *shape)
    torch.testing.assert_close(theirs(x), ours(x))


def test_the_bare_loop_trains() -> None:
    task = work.Work(clients=1, images=32, epochs=30, lr=0.05)
    model = work.LeNet(task.shape, task.classes, task.batch_norm)
    x, y = task.tensors(0)
    work.train(model, x, y, task)
    assert (model(x).argmax(1) == y).float().mean() > 0.9


def test_the_model_of_the_server_benchmark_has_the_size_of_a_resnet() -> None:
    assert LayerSpec.of(server.resnet()).parameters == 11_173_962
    assert LayerSpec.of(server.lenet()).parameters == 121_278


def test_the_limit_by_hand() -> None:
    spec, n, count = LayerSpec.of(torch.nn.Linear(3, 2)), 5, 2  # one layer of 8 numbers
    algorithm = PFedLA(embedding=3, hidden=4)
    by_flops = server.limits(algorithm, spec, n, count, flops=1.0, bandwidth=math.inf)
    assert by_flops == {"download": 160, "update": 160, "hypernetworks": 8 * 2 * (12 + 16 + 20), "models": 0}
    by_bytes = server.limits(algorithm, spec, n, count, flops=math.inf, bandwidth=1.0)
    hypernetworks = 28 * 2 * (3 + 12 + 4 + 16 + 4 + 25)
    assert by_bytes == {"download": 160, "update": 160, "hypernetworks": hypernetworks, "models": 16 * 2 * 8}


def test_seconds_in_functions_of_a_module_are_added_up_and_the_functions_put_back() -> None:
    before = equations.retained
    with server.timed(equations, {"retained": "Eq. 12"}) as spent:
        equations.retained(torch.eye(2).unsqueeze(1), torch.arange(2), 1)
        assert spent["Eq. 12"] > 0
    assert equations.retained is before


def test_a_missing_environment_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    with pytest.raises(SystemExit, match="make bench-peers"):
        peers.Peer("pfl", work.Work(), 1)


def test_the_page_shows_what_was_measured(tmp_path: Path) -> None:
    page, copy = ROOT / "docs" / "benchmarks.md", tmp_path / "page.md"
    found = tables.load(ROOT / "results" / "benchmarks.json")
    assert found.keys() == command.BENCHMARKS.keys()
    copy.write_text(page.read_text())
    tables.write_into(copy, found)
    assert copy.read_text() == page.read_text()


def test_tables_of_a_page_are_replaced_by_name(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table: one -->\nold\n<!-- end -->\nb\n<!-- table: two -->\nkept\n<!-- end -->\n")
    entry = {"commit": "c", "torch": "2", "cores": 2, "busy with other work": 0.014}
    tables.write_into(page, {"one": {**entry, "rows": [{"x": "y", "n": 1234}]}})
    assert page.read_text() == (
        "a\n<!-- table: one -->\n| x | n |\n| --- | ---: |\n| y | 1,234 |\n\n"
        "Commit `c`, torch 2, 2 cores, 1 % of them busy with other work meanwhile.\n<!-- end -->\n"
        "b\n<!-- table: two -->\nkept\n<!-- end -->\n"
    )


@pytest.mark.slow
def test_the_growth_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [scale.measure(60, how, 1, "", "fashion-mnist-10k") for how in (scale.FEW, scale.EXACT)]
    few, exact = found
    assert few.keys() == exact.keys()
    assert few["participants"] == 60
    assert few["state_gb"] < exact["state_gb"]
    assert few["accuracy"].keys() == {0, 1}
    assert few["round_s"] >= few["of_it_training_s"] > 0
    monkeypatch.setattr(scale, "FIGURE", tmp_path / "scale.png")
    scale.draw(json.loads(json.dumps(found)))
    assert (tmp_path / "scale.png").stat().st_size > 10_000
