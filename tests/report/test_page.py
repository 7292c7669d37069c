from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from click.testing import CliRunner

from pfedla import HeurPFedLA, cli
from pfedla.config import Experiment
from pfedla.errors import RunError
from pfedla.facts import facts_elsewhere
from pfedla.record import RunRecord
from pfedla.report import page
from pfedla.report.page import detail_of, encoded, overview_of, report, similarity
from pfedla.report.runs import Run, find_runs, spread
from tests.report.made import create, line, made
from tests.world import outcome_of, setting

pytest.importorskip("plotly")
EVIL = "</script><script>document.title='taken'</script>"


def run_of(path: Path) -> Run:
    (found,) = find_runs([path])
    return found


def data_of(text: str) -> Any:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def test_runs_are_found_below_a_folder_and_share_a_label_but_for_the_seed(tmp_path: Path) -> None:
    for seed in (0, 10, 9):
        made(tmp_path / "a" / f"pfedla-seed{seed}", seed=seed)
    made(tmp_path / "b", weights=False, algorithm="fedavg")
    runs = find_runs([tmp_path])
    assert [run.name for run in runs] == ["a/pfedla-seed0", "a/pfedla-seed9", "a/pfedla-seed10", "b"]
    assert [run.label for run in runs] == ["a/pfedla"] * 3 + ["b"]
    assert [run.name for run in find_runs([tmp_path / "a", tmp_path / "a" / "pfedla-seed9"])][1] == "pfedla-seed9"
    assert run_of(tmp_path / "b").algorithm == "fedavg"


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    made(tmp_path / "outside" / "run")
    made(tmp_path / "inside" / "run")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (tmp_path / "inside" / "elsewhere").symlink_to(tmp_path / "outside")
    assert [run.name for run in find_runs([tmp_path / "inside"])] == ["run"]
    (tmp_path / "inside" / "run" / "error.txt").symlink_to(secret)
    assert find_runs([tmp_path / "inside"]) == []


def test_what_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no folder that holds runs"):
        find_runs([tmp_path / "none"])
    assert find_runs([tmp_path]) == []
    with pytest.raises(RunError, match="no run to report on"):
        report([])


def test_a_page_holds_everything_and_fetches_nothing(tmp_path: Path) -> None:
    made(tmp_path / "pfedla-seed0", retained=True)
    text = report(find_runs([tmp_path]))
    data = data_of(text)
    (shown,) = data["runs"]
    detail = data["details"][shown["id"]]
    assert (shown["state"], shown["label"], shown["round"], shown["headline"]) == ("done", "pfedla", 6, "accuracy")
    assert shown["curve"]["round"] == [1, 2, 3, 4, 5, 6]
    assert detail["clients"]["name"][0] == detail["clients"]["name"][int(np.argmin(detail["clients"]["before"]))]
    assert detail["holdings"]["counts"][1] == [0, 15, 5, 0]
    assert (detail["bytes"]["down"], detail["bytes"]["beside"]["up"]) == ([720, 720], 126)
    assert len(detail["retained"]["share"]) == 2
    assert detail["command"] == f"pfedla run {tmp_path}/pfedla-seed0/config.toml --out NEW-FOLDER"
    assert "fashion-mnist-10k" in detail["config"]
    tags = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", tags)
    assert "default-src 'none'" in tags
    assert "unsafe-eval" not in tags
    assert text.count("<script") - text.count("\\x3cscript") >= 3


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    made(tmp_path / "run", clients=5, layers=["a", "b", "c"])
    run = run_of(tmp_path / "run")
    alpha = run.record.diagnostics()["alpha"]
    shown = detail_of(run)["weights"]
    values = np.frombuffer(base64.b64decode(shown["values"]), "<u2").reshape(6, 3, 5, 5) / 65535
    np.testing.assert_allclose(values, alpha.transpose(0, 2, 1, 3), atol=1e-5)
    own = [[np.mean([frame[i, layer, i] for i in range(5)]) for layer in range(3)] for frame in alpha]
    np.testing.assert_allclose(shown["own"], own, rtol=1e-6)
    other = ~np.eye(5, dtype=bool)
    expected = np.corrcoef(alpha[2, :, 1][other], np.array(shown["similarity"])[other])[0, 1]
    assert shown["agreement"][2][1] == pytest.approx(expected, abs=1e-6)


def test_weights_on_candidates_are_put_where_they_belong(tmp_path: Path) -> None:
    record = create(tmp_path / "run", names=list("abc"))
    record.append(line(np.random.default_rng(0), 1, 3, 10))
    record.release()
    run = run_of(tmp_path / "run")
    alpha, candidates = np.array([[[0.75, 0.25]], [[0.5, 0.5]], [[0.125, 0.875]]]), np.array([[0, 2], [0, 1], [1, 2]])
    diagnostics = {
        "alpha": alpha[None],
        "candidates": candidates[None],
        "round": np.array([1]),
        "layers": np.array(["fc"]),
    }
    shown = page._weights(run, diagnostics, None, 10**6)
    assert shown is not None
    values = np.frombuffer(base64.b64decode(shown["values"]), "<u2").reshape(3, 3) / 65535
    np.testing.assert_allclose(values, [[0.75, 0, 0.25], [0.5, 0.5, 0], [0, 0.125, 0.875]], atol=1e-5)
    assert shown["own"][0][0] == pytest.approx((0.75 + 0.5 + 0.875) / 3)


def test_similarity_is_the_cosine_of_label_counts() -> None:
    found = similarity(np.array([[10, 0], [5, 0], [0, 7], [0, 0], [3, 3]]))
    root = 0.5**0.5
    expected = [[1, 1, 0, 0, root], [1, 1, 0, 0, root], [0, 0, 1, 0, root], [0, 0, 0, 0, 0], [root, root, root, 0, 1]]
    np.testing.assert_allclose(found, expected)


def test_names_from_outside_are_data_and_never_markup(tmp_path: Path) -> None:
    evil = tmp_path / "<img src=x onerror=document.title=1>"
    made(evil, names=[EVIL, "a\u2028b", "&amp;"], layers=["<svg onload=1>"])
    text = report(find_runs([tmp_path]))
    assert EVIL not in text
    assert "<img" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # Plotly's own text has some
    assert "<svg onload" not in text
    data = data_of(text)
    assert data["runs"][0]["name"] == evil.name
    names = data["details"][data["runs"][0]["id"]]["weights"]["clients"]
    assert names == [EVIL, "a\u2028b", "&amp;"]


def test_json_for_a_page_has_no_character_that_html_reads() -> None:
    value = {"<&>": ["\u2028\u2029</script>", float("nan"), np.float32(0.5), np.arange(2)]}
    text = encoded(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"<&>": ["\u2028\u2029</script>", None, 0.5, [0, 1]]}


@pytest.mark.slow
def test_many_clients_and_rounds_are_thinned_to_a_page_of_less_than_20_mb(tmp_path: Path) -> None:
    made(tmp_path / "pfedla-seed0", clients=100, rounds=600, every=6, layers=[f"l{i}" for i in range(5)])
    made(tmp_path / "many", clients=700, rounds=2, layers=["l"])
    text = report(find_runs([tmp_path]))
    assert len(text.encode()) < 20_000_000
    data = data_of(text)
    details = {run["label"]: data["details"][run["id"]] for run in data["runs"]}
    weights = details["pfedla"]["weights"]
    assert (len(weights["clients"]), weights["of_clients"]) == (100, 100)
    assert 2 <= len(weights["rounds"]) < weights["of_rounds"] == 100
    assert (weights["rounds"][0], weights["rounds"][-1]) == (6, 600)
    many = details["many"]
    assert (len(many["weights"]["clients"]), len(many["clients"]["name"]), many["clients"]["of"]) == (100, 600, 700)
    assert min(many["clients"]["before"]) == many["clients"]["before"][0]


def test_places_are_spread_evenly_with_both_ends() -> None:
    assert spread(5, 9) == [0, 1, 2, 3, 4]
    assert spread(101, 3) == [0, 50, 100]
    assert spread(0, 3) == []
    assert spread(1, 3) == [0]


def test_a_run_under_way_shows_its_latest_checkpoint(tmp_path: Path) -> None:
    record = create(tmp_path / "run", names=list("abcd"), algorithm="heurpfedla")
    outcome_of(setting(HeurPFedLA(), "mlp"), record, checkpoint_every=0)
    run = run_of(tmp_path / "run")
    assert overview_of(run)["state"] == "running"
    detail = detail_of(run)
    assert detail["weights"]["rounds"].tolist() == [2, 4, 6]
    assert detail["bytes"]["round"] == 6
    assert detail["retained"]["layers"].tolist() == ["fc1", "fc2"]
    assert "--resume" in detail["command"]
    record.release()
    assert overview_of(run)["state"] == "resumable"
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"damaged")
    assert detail_of(run)["weights"] is None
    record.fail(ValueError("out of luck"))
    shown = overview_of(run_of(tmp_path / "run"))
    assert (shown["state"], shown["error"]) == ("failed", "out of luck")


def test_a_damaged_run_is_listed_and_hides_nobody(tmp_path: Path) -> None:
    made(tmp_path / "good")
    for name, text in (("no-json", "{"), ("odd", '{"names": 5}'), ("old", "{}")):
        made(tmp_path / name)
        (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "old" / "metrics.jsonl").write_text('{"round": "x"}\n{"round": 2}\n')
    shown = data_of(report(find_runs([tmp_path])))["runs"]
    states = {run["name"]: run["state"] for run in shown}
    assert states["good"] == "done"
    assert states["no-json"] == states["odd"] == "unreadable"
    assert all(run["error"] for run in shown if run["state"] == "unreadable")


def test_counts_of_classes_are_read_back_and_bounded(tmp_path: Path) -> None:
    record = create(tmp_path / "run", names=list("ab"))
    counts = record.holdings()
    assert counts is not None
    assert counts[..., 0].tolist() == [[15, 5, 0, 0], [0, 15, 5, 0]]
    assert counts[..., 1].tolist() == [[9, 3, 0, 0], [0, 9, 3, 0]]
    facts = record.facts()
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts | {"holdings": [{"7": [1, 1]}]}))
    with pytest.raises(RunError, match="cannot read"):
        record.holdings()
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts | {"classes": []}))
    assert record.holdings() is None


def test_report_writes_beside_the_runs_or_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(Path("runs/one-seed0"))
    done = CliRunner().invoke(cli.cli, ["report", "runs"])
    assert done.exit_code == 0, done.output
    assert re.fullmatch(r"report: runs/report.html \(\d\.\d MB\)\n", done.output)
    assert CliRunner().invoke(cli.cli, ["report", "runs/one-seed0", "-o", "there/page.html"]).exit_code == 0
    assert data_of(Path("there/page.html").read_text())["runs"][0]["name"] == "one-seed0"
    assert CliRunner().invoke(cli.cli, ["report", "runs/one-seed0"]).exit_code == 0
    again = RunRecord.create("runs/one-seed0", "", {}, overwrite=True)  # the page of what was there goes with it
    again.release()
    assert not Path("runs/one-seed0/report.html").exists()
    failed = CliRunner().invoke(cli.cli, ["report", "there"])
    assert isinstance(failed.exception, RunError)
    assert str(failed.exception) == "there holds no run"


def test_runs_that_differ_in_more_than_the_seed_do_not_share_a_label(tmp_path: Path) -> None:
    for seed, rounds in ((0, 6), (1, 6), (2, 4)):
        made(tmp_path / "a" / f"pfedla-seed{seed}", seed=seed, rounds=rounds)
        made(tmp_path / "b" / f"local-seed{seed}", seed=seed)
    runs = find_runs([tmp_path])
    assert [run.label for run in runs] == [f"a/pfedla-seed{seed}" for seed in range(3)] + ["b/local"] * 3


def test_seeds_are_thinned_to_the_same_rounds(tmp_path: Path) -> None:
    records = [made(tmp_path / f"x-seed{seed}", seed=seed, rounds=90, weights=False) for seed in (0, 1)]
    whole, part = (overview_of(run_of(record.path), 20) for record in records)
    assert whole["curve"]["round"] == part["curve"]["round"]
    assert (whole["curve"]["round"][-1], whole["round"], whole["evaluated"]) == (90, 90, 90)
    assert len(whole["curve"]["round"]) <= 20 + 1
    history = records[1].path / "metrics.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[:61]))
    shorter = overview_of(run_of(records[1].path), 20)["curve"]["round"]
    assert shorter[-1] == 61
    assert set(shorter[:-1]) <= set(whole["curve"]["round"])


def test_what_a_deployment_is_scored_by_and_on_is_known(tmp_path: Path) -> None:
    tables: dict[str, dict[str, Any]] = {
        "objective": {"name": "multi-label"},
        "data": {"clients": 2, "validation": 0.2},
    }
    facts = facts_elsewhere(Experiment.from_tables(tables), ["a", "b"], [[70, 0], [50, 0]])
    record = RunRecord.create(tmp_path / "run", tomli_w.dumps(facts["settings"]), facts)
    record.append(line(np.random.default_rng(0), 1, 2, 40, "f1"))
    record.release()
    run = run_of(record.path)
    assert (run.headline, run.percent, run.higher_is_better) == ("f1", True, True)
    assert overview_of(run)["scored_on"] == "validation"
    before = detail_of(run)["clients"]["before"]
    assert before == sorted(before)  # the worst first
