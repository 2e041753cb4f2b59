"""Every example runs as it stands, in seconds and without the network."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from tests.cli.runs import finish, start
from tests.docs.blocks import unprinted
from tests.docs.run_notebook import NOTEBOOK, execute, outputs, text_of

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread per rank: spinning threads on shared cores would turn milliseconds into seconds."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})


def test_scipy_graph(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the example breaks, or the graph does not help on a graph made for it."""
    runpy.run_path(str(EXAMPLES / "scipy_graph.py"), run_name="__main__")
    out = capsys.readouterr().out
    mlp, gcn = numbers(r"test accuracy ([\d.]+)", out)
    assert gcn > mlp + 0.1
    assert numbers(r"3000 vertices, ([\d.]+) of", out) == [gcn]


def test_pyg_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the example breaks, or weights change their meaning between mggcn and PyG."""
    runpy.run_path(str(EXAMPLES / "pyg_data.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert numbers(r"test accuracy ([\d.]+)", out)[0] > 0.8
    differences = numbers(r"differ by (\S+) of", out)
    assert len(differences) == 2
    assert max(differences) < 1e-5


@pytest.mark.full
def test_own_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the example breaks, or a module of one's own trains otherwise on three ranks than on one."""
    trains_alike("own_model.py", capsys, monkeypatch)


@pytest.mark.full
def test_own_gat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the example breaks, or attention, masks or batch norm depend on the number of ranks."""
    trains_alike("own_gat.py", capsys, monkeypatch)


def trains_alike(example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a module of one's own on one rank and on three."""
    monkeypatch.setattr("sys.argv", [example, "3"])
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    out = capsys.readouterr().out
    differences = numbers(r"3 ranks, \w+: losses differ by (\S+) from", out)
    assert len(differences) == 2
    assert max(differences) < 1e-5
    assert min(numbers(r"test accuracy ([\d.]+)", out)) > 0.8


@pytest.mark.full
def test_torchrun_train(tmp_path: Path) -> None:
    """Fails if the example breaks, or more than one rank prints."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "torchrun_train.py"))
    code, out, err = finish(start(tmp_path / "store", tmp_path / "run", module=launcher))
    assert code == 0, err
    (accuracy,) = numbers(r"test accuracy ([\d.]+) on 2 ranks", out)
    assert accuracy > 0.5
    assert out.count("run folder") == 1


@pytest.mark.full
def test_notebook(tmp_path: Path) -> None:
    """Fails if a cell breaks in a kernel of its own, learns or draws nothing, or shows something else than the file has."""
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    done = tmp_path / "done.ipynb"
    execute(NOTEBOOK, done)
    found = outputs(json.loads(done.read_text()))
    shown = [output["data"] for output in found if "data" in output]
    printed = "".join("".join(output["text"]) for output in found if output["output_type"] == "stream")
    assert sum("image/png" in data for data in shown) == 2
    assert sum("<th>predicted peak</th>" in "".join(data.get("text/html", "")) for data in shown) == 2
    (accuracy,) = numbers(r"100 epochs, test accuracy ([\d.]+)", printed)
    assert accuracy > 0.8
    assert len(numbers(r"article \d+: topic \d \(([\d.]+)\)", printed)) == 5
    assert max(numbers(r"losses differ by at most (\S+)", printed)) < 1e-5
    (counts,) = (eval("".join(data["text/plain"])) for data in shown if "".join(data["text/plain"]).startswith("[(0"))
    assert sum(count for _, count in counts) > 600

    kept = outputs(json.loads(NOTEBOOK.read_text()))
    assert [output["output_type"] for output in kept] == [output["output_type"] for output in found]
    for one, two in zip(map(text_of, kept), map(text_of, found), strict=True):
        assert unprinted(one, two) == [], two


def test_the_notebook_has_the_outputs_of_a_run() -> None:
    """Fails if outputs are missing or errors, cells ran in another order, or a path of a machine is in them."""
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    found = outputs(notebook)
    assert len(found) >= 8
    assert {output["output_type"] for output in found} <= {"display_data", "execute_result", "stream"}
    said = json.dumps([{k: v for k, v in output.get("data", output).items() if k != "image/png"} for output in found])
    assert re.findall(r"(?<![\w<])/[a-z]+/[\w.-]+", said) == []


def test_every_example_is_tested() -> None:
    """Fails if an example is added without a test."""
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"))} <= tested
