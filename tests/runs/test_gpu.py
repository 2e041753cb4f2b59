"""Commands as users give them, on a GPU beside the CPU: the same losses, scores and answers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn.backend.cpu.machine import Host
from mggcn.backend.cuda import presence
from mggcn.backend.cuda.driver import Gpu
from mggcn.graph.generate import community as generate
from mggcn.graph.links import split_links
from tests.cli.runs import history, losses, result, run_main, same_tensors
from tests.devices import EMULATED, GPU, Where
from tests.emulator.device import EmulatedDevice
from tests.model.test_rgcn import typed_graph
from tests.nn.graphs import options

SMALL = ["--quiet", "--epochs", 3, "--seed", 4057, "--set", "model.hidden=16,16", "--set", "model.dropout=0.3"]
BATCHES = ["--batch", 20, "--fanout", "4,3,2"]
STEPS: dict[str, list[Any]] = {"whole": [], "batches": BATCHES}
RTOL = {"fp32": 2e-5, "tf32": 5e-3, "mixed": 5e-3, "bf16": 5e-3}
"""Of losses, as docs/gpu.md has it for float32; a unit in the last place of bfloat16 is 4e-3."""


def places(cases: Iterable[Any] = ("",), quick: Collection[Any] = ("",)) -> pytest.MarkDecorator:
    """Every case on a GPU, and under the emulator; there all but the quick ones are left to `make test-all`."""
    listed = list(cases)
    both = [
        *(pytest.param(EMULATED, c, id=f"emulated {c}", marks=() if c in quick else pytest.mark.full) for c in listed),
        *(pytest.param(GPU, c, id=f"cuda {c}", marks=pytest.mark.cuda) for c in listed),
    ]
    return pytest.mark.parametrize(("gpu", "name"), both, indirect=["gpu"])


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Where:
    """The GPU of this process: its own, or an emulated one, with all that says that it is there."""
    where: Where = getattr(request, "param", GPU)
    if where is EMULATED:
        monkeypatch.setattr(
            "mggcn.backend.cuda.device.CudaDevice", lambda index, capture: EmulatedDevice(seed=index + 13)
        )
        monkeypatch.setattr(presence, "missing_for_cuda", lambda: "")
        monkeypatch.setattr(presence, "check_cuda", lambda precision: None)
        monkeypatch.setattr(presence, "gpu_host", lambda: Host("emulated", "sm_90", 132, ""))
        monkeypatch.setattr("mggcn.assemble.plan.gpu_free_bytes", lambda count: 80 << 30)
        for room in ("plan", "rank"):
            monkeypatch.setattr(f"mggcn.assemble.{room}.visible_gpus", lambda: [Gpu("emulated", "")])
    return where


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores of 150 vertices of one kind each."""
    folder = tmp_path_factory.mktemp("stores")
    graphs = {
        "classes": generate(150, 700, 12, 3, seed=5),
        "typed": typed_graph("random"),
        "links": split_links(generate(150, 1400, 12, 3, seed=5), (0.8, 0.1, 0.1), negatives=5, seed=4),
    }
    for name, graph in graphs.items():
        mggcn.save(graph, folder / name)
    return {name: folder / name for name in graphs}


@dataclass(frozen=True)
class Both:
    """Folders of the same run on the CPU and on the GPU."""

    cpu: Path
    gpu: Path

    def near(self, rtol: float = RTOL["fp32"]) -> None:
        """Compare their losses."""
        assert len(losses(self.gpu)) > 1
        np.testing.assert_allclose(losses(self.gpu), losses(self.cpu), rtol=rtol)


def trained(folder: Path, store: Path, *arguments: object) -> Both:
    """Train twice. On the CPU with one thread, which no result depends on; on the GPU by default."""
    both = Both(folder / "cpu", folder / "gpu")
    shared = ["train", store, *SMALL, *arguments]
    assert run_main(*shared, "--threads", 1, "--out", both.cpu) == 0
    assert run_main(*shared, "--device", "cuda", "--out", both.gpu) == 0
    return both


WHOLE: dict[str, list[Any]] = {
    "fp32": [],
    "mixed": ["--precision", "mixed"],
    "bf16": ["--precision", "bf16"],
    "ranks that are threads": ["--ranks", 2, "--transport", "threads"],
    "halo": ["--ranks", 2, "--transport", "threads", "--strategy", "halo"],
    "repeated": ["--repeat", 2, "--set", "train.patience=2", "--set", "train.clip_norm=1"],
    "sage": ["--set", "model.kind=sage", "--set", "model.aggregator=max", "--set", "train.checkpoint_every=1"],
    "gat": ["--set", "model.kind=gat", "--set", "model.heads=2"],
    "auto": ["--order", "auto", "--strategy", "auto", "--set", "train.metric=macro_f1"],
}


@places(WHOLE, ("fp32", "repeated"))
def test_whole_graph(name: str, stores: dict[str, Path], tmp_path: Path, gpu: Where) -> None:
    """Fails if the command ends, or trains otherwise than on a CPU."""
    both = trained(tmp_path, stores["classes"], *WHOLE[name])
    both.near(RTOL[name] if name in RTOL else RTOL["fp32"])
    if gpu is GPU and name == "fp32":
        assert result(both.gpu)["captured"] == {"epoch": "captured", "evaluation": "captured"}


@pytest.mark.cuda
def test_tf32(stores: dict[str, Path], tmp_path: Path) -> None:
    """Fails if products in tf32 end the command, or are further from float32 than their 10 bits."""
    shared = ["train", stores["classes"], *SMALL]
    both = Both(tmp_path / "cpu", tmp_path / "gpu")
    assert run_main(*shared, "--out", both.cpu) == 0
    assert run_main(*shared, "--device", "cuda", "--precision", "tf32", "--out", both.gpu) == 0
    both.near(RTOL["tf32"])


ON_BATCHES: dict[str, list[Any]] = {
    "gcn": [],
    "bf16": ["--precision", "bf16"],
    "mixed": ["--precision", "mixed"],
    "sage": ["--set", "model.kind=sage", "--set", "model.aggregator=mean", "--set", "sample.first=full"],
    "gat": ["--set", "model.kind=gat", "--set", "model.heads=2", "--set", "sample.ahead=0"],
    "rgcn": ["--set", "model.kind=rgcn", "--set", "model.bases=2"],
    "many ahead": ["--set", "sample.ahead=12", "--set", "sample.draw=labor"],
    "ranks that are threads": ["--ranks", 2, "--transport", "threads", "--set", "run.batches=cooperative"],
    "compared": ["--compare-gradient", 1],
}


@places(ON_BATCHES, ("gcn",))
def test_batches(name: str, stores: dict[str, Path], tmp_path: Path, gpu: Where) -> None:
    """Fails if the command ends, or trains otherwise than on a CPU, or its steps are not captured."""
    both = trained(tmp_path, stores["typed" if name == "rgcn" else "classes"], *BATCHES, *ON_BATCHES[name])
    both.near(RTOL[name] if name in RTOL else RTOL["fp32"])
    if name == "compared":
        mine, expected = ([row["gradient_cosine"] for row in history(at)] for at in (both.gpu, both.cpu))
        np.testing.assert_allclose(mine, expected, rtol=1e-4)
    if gpu is GPU and name not in ("rgcn", "ranks that are threads"):
        assert result(both.gpu)["captured"]["epoch"] == "captured"


LINKS: dict[str, list[Any]] = {
    "whole": [],
    "mixed": ["--precision", "mixed", "--set", "links.decoder=8"],
    "ranks that are threads": ["--ranks", 2, "--transport", "threads"],
    "batches": ["--batch", 60, "--fanout", "4,3,2", "--set", "links.decoder=8"],
    "in-batch": ["--batch", 60, "--fanout", "4,3,2", "--set", "links.negatives_from=in-batch"],
}


@places(LINKS, ("whole", "batches"))
def test_links(name: str, stores: dict[str, Path], tmp_path: Path, gpu: Where) -> None:
    """Fails if a run on links ends, trains or scores otherwise than on a CPU, is not captured, or scores other pairs."""
    both = trained(tmp_path, stores["links"], "--set", "links.embedding=8", *LINKS[name])
    rtol = RTOL[name] if name in RTOL else RTOL["fp32"]
    both.near(rtol)
    mine, expected = result(both.gpu)["links"], result(both.cpu)["links"]
    for split in ("val", "test"):
        assert mine[split]["roc_auc"] == pytest.approx(expected[split]["roc_auc"], abs=0.02)
    if gpu is GPU and name != "ranks that are threads":
        assert result(both.gpu)["captured"] == {"epoch": "captured", "evaluation": "captured"}
    np.save(tmp_path / "pairs.npy", np.array([[0, 1], [7, 149], [3, 3]]))
    for arguments in ([], ["--pairs", tmp_path / "pairs.npy"]):
        mine, expected = (predicted(folder, *arguments) for folder in (both.gpu, both.cpu))
        np.testing.assert_allclose(mine, expected, rtol=50 * rtol, atol=5 * rtol, err_msg=str(arguments))


def predicted(folder: Path, *arguments: object) -> Any:
    """Return what `mggcn predict` writes."""
    out = folder / "predicted.npy"
    assert run_main("predict", folder, *arguments, "--out", out) == 0
    return np.load(out)


@places(STEPS, ("batches",))
def test_what_follows_a_run(
    name: str, stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a command on the folder of a run ends, or answers otherwise than on a CPU's."""
    both = trained(tmp_path, stores["classes"], *STEPS[name])
    for arguments in ([], ["--vertices", "0,7,149"], ["--layer", 1], ["--weights", "last", "--probabilities"]):
        mine, expected = (predicted(folder, *arguments) for folder in (both.gpu, both.cpu))
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-4, err_msg=str(arguments))
    assert run_main("status", both.gpu) == 0
    assert run_main("report", both.gpu) == 0
    started = ["train", stores["classes"], *SMALL, *STEPS[name], "--start-from", both.gpu, "--device", "cuda"]
    assert run_main(*started, "--out", tmp_path / "started") == 0
    assert losses(tmp_path / "started")[0] < losses(both.gpu)[0]
    capsys.readouterr()
    assert (
        run_main("plan", stores["classes"], *STEPS[name], "--device", "cuda", "--set", "model.hidden=16,16", "--json")
        == 0
    )
    assert json.loads(capsys.readouterr().out)


@places(STEPS, ("batches",))
def test_a_run_is_resumed(name: str, stores: dict[str, Path], tmp_path: Path) -> None:
    """Fails if a run that is extended has other bits than a longer one, also of what the optimiser keeps on the device."""
    command = ["train", stores["classes"], *SMALL, *STEPS[name], "--device", "cuda"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_main(*command, "--epochs", 6, "--out", whole) == 0
    assert run_main(*command, "--out", parts) == 0
    assert run_main("train", "--resume", parts, "--epochs", 6, "--quiet") == 0
    assert history(parts) == history(whole)
    assert same_tensors(parts, whole)


@places(STEPS, ())
def test_timeline(name: str, stores: dict[str, Path], tmp_path: Path) -> None:
    """Fails if recording when ops ran ends the run, changes a loss, or cannot be drawn."""
    both = trained(tmp_path, stores["classes"], *STEPS[name], "--epochs", 8, "--timeline")
    both.near()
    assert list(both.gpu.glob("timeline*"))
    assert run_main("report", both.gpu) == 0


@places(quick=())
def test_products_are_tuned(name: str, stores: dict[str, Path], tmp_path: Path) -> None:
    """Fails if timing the variants of sparse products ends, or a run cannot use what was found."""
    store = tmp_path / "store"
    mggcn.save(mggcn.load(stores["classes"]), store)
    chosen = ["--set", "run.device=cuda", "--width", "16,16"]
    assert run_main("tune", "--store", store, *chosen, "--epochs", 3) == 0
    trained(tmp_path, store).near()


@pytest.mark.cuda
def test_a_sweep(stores: dict[str, Path], tmp_path: Path) -> None:
    """Fails if trials end on a GPU, each in a process of its own."""
    pytest.importorskip("optuna")
    grid = tmp_path / "grid.toml"
    grid.write_text('[grid]\n"train.lr" = [0.01, 0.02]\n')
    command = [
        "sweep",
        grid,
        stores["classes"],
        *SMALL,
        "--trials",
        2,
        "--search",
        "tpe",
        "--device",
        "cuda",
        "--out",
        tmp_path / "sweep",
    ]
    assert run_main(*command) == 0
    assert len(list((tmp_path / "sweep" / "trials").glob("*/result.json"))) == 2


@places(STEPS, ("whole",))
def test_python(name: str, stores: dict[str, Path]) -> None:
    """Fails if a Trainer trains, goes on, scores or predicts otherwise than on a CPU, or hands out tensors of the GPU."""
    found, sampled = [], {"batch": 20, "fanout": (4, 3)} if name == "batches" else {}
    for device in ("cpu", "cuda"):
        more: dict[str, Any] = {"device": device} | ({"threads": 1} if device == "cpu" else {}) | sampled
        trainer = mggcn.Trainer(stores["classes"], mggcn.SAGE(16, dropout=0.2), seed=31, lr=0.02, **more)
        rows = [*trainer.fit(epochs=3), *trainer.fit(epochs=5)]
        some, state = trainer.predict(vertices=[3, 77]), trainer.state_dict()
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        scores = [trainer.evaluate(split) for split in ("train", "val", "test")]
        found.append(([row["loss"] for row in rows], trainer.predict(), some, scores))
    (mine, logits, some, scores), (expected, logits_cpu, some_cpu, scores_cpu) = found[1], found[0]
    np.testing.assert_allclose(mine, expected, rtol=RTOL["fp32"])
    np.testing.assert_allclose(logits, logits_cpu, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(some, some_cpu, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(scores, scores_cpu, atol=0.05)


def own_layers(graph: mggcn.Graph, **where: Any) -> Iterator[Any]:
    """Results and gradients of a loop of one's own, over the whole graph and over batches, on the host."""
    edges = mggcn.nn.DeviceGraph(graph, **where)
    rng = np.random.default_rng(9)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).float()

    x = draw(graph.num_vertices, 8).to(edges.device).requires_grad_()
    out = mggcn.nn.reduce_edges(edges, "copylhs", "max", x)
    out.square().sum().backward()
    assert x.grad is not None
    yield from (out, x.grad)
    loader = mggcn.nn.batches(graph, "train", fanout=(3, 2), batch=20, seed=5, **where)
    layer = draw(graph.num_features, 8).to(edges.device).requires_grad_()
    for batch in loader:
        hidden = mggcn.nn.aggregate(batch.x @ layer, batch.blocks[0]).relu()
        mggcn.nn.aggregate(hidden, batch.blocks[1]).square().mean().backward()
    yield layer.grad


@places()
def test_own_loops(name: str, stores: dict[str, Path], gpu: Where) -> None:
    """Fails if operations or batches for a loop of one's own have other results or gradients than on a CPU."""
    graph = mggcn.load(stores["classes"])
    for mine, expected in zip(own_layers(graph, **options(gpu)), own_layers(graph, device="cpu"), strict=True):
        mine, expected = mine.detach().cpu().numpy(), expected.detach().numpy()
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


class Net(torch.nn.Module):
    """Two layers of one's own."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        self.first, self.second = torch.nn.Linear(features, 8), torch.nn.Linear(8, classes)
        for weight in self.parameters():
            weight.data.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, x: torch.Tensor, part: mggcn.nn.PartitionedGraph) -> torch.Tensor:
        hidden = mggcn.nn.dropout(torch.relu(self.first(mggcn.nn.aggregate(x, part))), part, 0.3, self.training)
        scores: torch.Tensor = self.second(mggcn.nn.aggregate(hidden, part))
        return scores


@places(("classes", "links"), ("classes", "links"))
def test_own_module(name: str, stores: dict[str, Path]) -> None:
    """Fails if a module of one's own trains or predicts otherwise than on a CPU."""
    graph, found = mggcn.load(stores[name]), []
    for device in ("cpu", "cuda"):
        trainer = mggcn.Trainer(graph, Net(12, 3), seed=31, lr=0.02, device=device, threads=1)
        found.append(([row["loss"] for row in trainer.fit(epochs=4)], trainer.predict()))
    (expected, logits_cpu), (mine, logits) = found
    np.testing.assert_allclose(mine, expected, rtol=RTOL["fp32"])
    np.testing.assert_allclose(logits, logits_cpu, rtol=1e-3, atol=1e-4)
