"""mggcn/report/compare.py: several runs, or the trials of a sweep, on one page."""

import json
import re
from pathlib import Path

import pytest

from mggcn.cli.entry import main
from mggcn.errors import RunError
from mggcn.report import write_reports
from mggcn.report.compare import write_sweep_page
from mggcn.runs.sweep import Sweep, Trial
from tests.report.run_folders import HOSTILE, write_run
from tests.report.test_write_report import checked


def rows(page: Path, caption: str = "") -> list[list[str]]:
    """The cells of the table whose head begins with a word."""
    for table in re.findall(r"<table.*?</table>", page.read_text(), re.DOTALL):
        found = [re.findall(r"<t[hd][^>]*>([^<]*)<", row) for row in re.findall(r"<tr>.*?</tr>", table)]
        if found[0][0] == caption:
            return found
    raise AssertionError(f"no table {caption}")


def test_several_runs(tmp_path: Path) -> None:
    """Fails if a run, a score, or a setting in which they differ is missing, or a curve is another run's."""
    runs = [write_run(tmp_path / name, epochs=epochs) for name, epochs in (("a", 20), ("b", 30))]
    (path,) = write_reports(runs)
    assert path == tmp_path / "comparison.html"
    page = checked(path)
    head, first, second = rows(path, "run")
    assert head == ["run", "graph", "metric", "epochs", "val", "test", "train.epochs"]
    best = json.loads((runs[1] / "result.json").read_text())["best"]
    assert second == ["b", "arxiv", "accuracy", "30", f"{best['val']:.4f}", f"{best['test']:.4f}", "30"]
    assert first[-1] == "20"
    history = [json.loads(line) for line in (runs[1] / "history.jsonl").read_text().splitlines()]
    values = " ".join(f"{epoch['val']:.4g}" for epoch in history)
    assert f'data-y="{values}"' in path.read_text()
    assert "do not compare" not in page.text


def test_runs_that_do_not_compare(tmp_path: Path) -> None:
    """Fails if scores of two metrics stand side by side without a word, or an unfinished run passes for a whole one."""
    runs = [write_run(tmp_path / "x" / "run", epochs=4), write_run(tmp_path / "y" / "run", epochs=4, finished=False)]
    result = json.loads((runs[0] / "result.json").read_text())
    (runs[0] / "result.json").write_text(json.dumps(result | {"metric": HOSTILE}))
    (path,) = write_reports(runs, tmp_path / "page.html")
    text = checked(path).text
    assert "do not compare" in text
    assert "was interrupted" in text
    assert [row[0] for row in rows(path, "run")[1:]] == ["x/run", "y/run"]


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if one run twice, no run, or a page of one run by --out is taken."""
    run = write_run(tmp_path / "a", epochs=3)
    with pytest.raises(RunError, match="named twice"):
        write_reports([run, tmp_path / "." / "a"])
    with pytest.raises(RunError, match="is not a run folder"):
        write_reports([run, tmp_path / "absent"])
    assert main(["report", str(run), "--out", str(tmp_path / "x.html")]) == 2
    assert "remove --out" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def sweep(folder: Path, metric: str = "accuracy") -> Sweep:
    """A sweep of 2 x 3 settings, of which one failed and one was not run."""
    trials = []
    for number, (width, lr) in enumerate(((w, r) for w in ([8], [16, 16]) for r in (0.1, 0.01, 0.001)), start=1):
        scores = {"epoch": 3, "train": 1.0, "val": number / 10, "test": number / 20}
        result = {"metric": metric, "best": scores, "final": scores, "epochs": 12}
        trials.append(Trial(number, {"model.hidden": width, "train.lr": lr}, result, seconds=1.5))
        write_run(folder / "trials" / f"{number:03d}", epochs=12)
    trials[1].result, trials[1].error = None, "the loss is not finite <b>"
    trials[2].result = None
    return Sweep(folder, trials, metric)


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 6), ("rmse", 1)])
def test_a_sweep(tmp_path: Path, metric: str, best: int) -> None:
    """Fails if another trial is the best, a failure is hidden, or a cell of the heat map holds another trial's score."""
    path = write_sweep_page(sweep(tmp_path, metric), tmp_path / "report" / "index.html")
    assert f"of trial {best}, the best by validation" in checked(path).text
    assert f"<strong>{best / 20:.4f}</strong> test {metric}, val {best / 10:.4f}" in path.read_text()
    assert rows(path, "model.hidden") == [
        ["model.hidden", "0.001", "0.01", "0.1"],
        ["8", "-", "-", "0.1000"],
        ["16,16", "0.6000", "0.5000", "0.4000"],
    ]
    shades = [float(found) for found in re.findall(r"var\(--shade\),([\d.]+)", path.read_text())]
    assert shades[2 if metric == "rmse" else 3] == max(shades)
    trials = rows(path, "trial")
    assert trials[1][:3] == [str(best), *(["8", "0.1"] if best == 1 else ["16,16", "0.001"])]
    assert "the loss is not finite &lt;b&gt;" in trials[-2]
    assert trials[-1][-2] == "not run"


def test_a_sweep_of_ranges_or_one_setting_has_no_heat_map(tmp_path: Path) -> None:
    """Fails if draws that share no value fill a map of empty cells, or a sweep without a score breaks the page."""
    trials = [Trial(n, {"train.lr": n / 1000, "model.dropout": n / 100}, None, "out of memory") for n in range(1, 31)]
    path = write_sweep_page(Sweep(tmp_path, trials, "accuracy"), tmp_path / "report" / "index.html")
    text = checked(path).text
    assert "by train.lr" not in text
    assert "No trial has a validation score" in text
    assert len(rows(path, "trial")) == 31
