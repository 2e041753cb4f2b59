"""Run folders, what may run at all, and scoring another graph."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from mggcn.api.trainer import Trainer
from mggcn.assemble import plan as assemble
from mggcn.cli.entry import main
from mggcn.comm.failure import Interrupted
from mggcn.comm.single import SingleCommunicator
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.config.files import from_toml
from mggcn.config.values import DEBUG
from mggcn.errors import BackendError, ConfigError, GraphError, RunError, TrainError
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.partition.make import make_partition
from mggcn.runs import folder as run_folders
from mggcn.runs import local as local_ranks
from mggcn.runs import predict as predicting
from mggcn.runs import train as training
from mggcn.runs.prediction_files import probabilities_of
from mggcn.train.checkpoint import Progress, save_checkpoint
from tests.graphs import make_graph, pattern

N = 40


def graph_of(seed: int = 3, features: int = 5, sparse: bool = False) -> Graph:
    return make_graph(pattern("random", N, seed), num_features=features, num_classes=3, sparse=sparse, seed=seed)


def config_of(ranks: int = 1, epochs: int = 3) -> Config:
    return Config(
        model=ModelConfig(hidden=(4,), dropout=0.3),
        train=TrainConfig(seed=23, epochs=epochs),
        run=RunConfig(ranks=ranks, threads=1, transport="threads" if ranks > 1 else "auto"),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run on two threads."""
    return trained(tmp_path / "store", tmp_path / "run", config_of(2))


def trained(store: Path, out: Path, config: Config) -> Path:
    write_store(graph_of(), store)
    graph = open_store(store)
    planned = training.prepare_run(config, graph, store, out)
    training.run_training(planned, graph, quiet=True)
    return planned.folder


def test_a_run_folder_holds_everything(run: Path) -> None:
    """Fails if a run cannot be repeated, resumed or read from its folder alone."""
    config, plan, job = run_folders.read_run(run)
    chosen = {"metric": "accuracy", "loss": "cross_entropy"}  # of what was auto
    assert config == dataclasses.replace(config_of(2), train=dataclasses.replace(config_of().train, **chosen))
    assert plan["ranks"] == 2
    assert open_store(job["store"]).num_vertices == N
    assert Path(job["store"]).is_absolute()
    assert from_toml(run / "config.toml") == config
    result = json.loads((run / "result.json").read_text())
    keys = "metric best final epochs seconds_per_epoch setup_seconds planned_peak_bytes measured_peak_bytes arena_bytes"
    assert set(keys.split()) <= result.keys()
    assert {"bytes_sent_per_epoch", "versions", "graph_sha256"} <= result.keys()
    assert len((run / "history.jsonl").read_text().splitlines()) == result["epochs"] == 3
    assert [path.name for path in run.rglob("*") if path.name.endswith(".tmp")] == []


def test_what_cannot_run_here_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Fails if cuda silently becomes something else, needs a page to say what is missing, or leaves a folder behind."""
    if torch.cuda.is_available():
        pytest.skip("this machine can run on a GPU")
    for run in (RunConfig(device="cuda"), RunConfig(device="cuda", ranks=2)):
        with pytest.raises(
            BackendError, match=r"run.device cuda needs a torch built for CUDA|no usable NVIDIA GPU"
        ) as e:
            training.prepare_run(dataclasses.replace(config_of(), run=run), graph_of(), None, tmp_path / "run")
        assert "\n" not in str(e.value)
        assert "--device cpu" in str(e.value)
        assert not (tmp_path / "run").exists()


def test_a_run_never_overwrites_another(run: Path, tmp_path: Path) -> None:
    """Fails if a folder with anything in it is taken, or an empty one is not."""
    with pytest.raises(RunError, match=rf"not empty; .*: --resume {run}, in Python Trainer.from_run$"):
        run_folders.make_run_folder(config_of(), "any", run)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError,
        match=r"is a file, expected .*; name a folder that is new or empty: --out, in Python out=$",
    ):
        run_folders.make_run_folder(config_of(), "any", tmp_path / "file")
    with pytest.raises(RunError, match=r"not empty; name a folder that is new or empty: --out, in Python out=$"):
        run_folders.make_run_folder(config_of(), "any", tmp_path)
    (tmp_path / "empty").mkdir()
    assert run_folders.make_run_folder(config_of(), "any", tmp_path / "empty") == tmp_path / "empty"
    assert run_folders.make_run_folder(config_of(), "any", tmp_path / "a" / "b").is_dir()


def test_a_link_to_nowhere_is_no_folder(tmp_path: Path) -> None:
    """Fails if a name that is taken by something that is not there ends in a traceback."""
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunError, match="was taken by another run"):
        run_folders.make_run_folder(config_of(), "any", tmp_path / "run")


def test_a_signal_as_the_first_file_appears_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what the signal finds is a folder that nobody removes."""
    opened = Path.open

    def interrupted(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened(path, *args, **kwargs).close()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_folders.make_run_folder(config_of(), "any", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "epochs", "stays"),
    [(GraphError("bad"), 0, False), (GraphError("bad"), 1, True), (TrainError("nan"), 0, True)],
    ids=["bad input", "after an epoch", "not input"],
)
def test_only_a_run_that_never_began_is_discarded(tmp_path: Path, error: Exception, epochs: int, stays: bool) -> None:
    """Fails if a refused run blocks its folder, or a failure removes epochs or logs that were written."""
    folder = run_folders.make_run_folder(config_of(), "any", tmp_path / "run")
    if epochs:
        (folder / "history.jsonl").write_text("{}\n")
    with pytest.raises(type(error)), run_folders.discarded_if_refused(folder):
        raise error
    assert folder.exists() == stays


def test_a_last_sign_of_life_keeps_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if another rank that writes while the folder is removed leaves a folder without a run."""
    folder, remove, times = run_folders.make_run_folder(config_of(), "any", tmp_path / "run"), shutil.rmtree, []

    def meanwhile(path: Path, **options: Any) -> None:
        remove(path, **options)
        times.append(path)
        if len(times) < 3:
            (folder / "status").mkdir(parents=True)
            (folder / "status" / "rank-1.json").write_text("{}")

    monkeypatch.setattr(shutil, "rmtree", meanwhile)
    with pytest.raises(KeyboardInterrupt), run_folders.discarded_if_refused(folder):
        raise KeyboardInterrupt
    assert not folder.exists()
    assert len(times) == 3


def test_extending_a_run(tmp_path: Path) -> None:
    """Fails if fewer epochs than done, a setting that no run may change, or more epochs of repeats are accepted."""
    folder, config = tmp_path / "run", config_of(epochs=9)
    folder.mkdir()
    assert run_folders.continued(folder, config, {"epochs": "4"}).train.epochs == 4
    # The history runs ahead of the checkpoint, from which a resumed run goes on.
    (folder / "history.jsonl").write_text('{"epoch": 1}\n{"epoch": 7}\n')
    save_checkpoint(folder / "checkpoints", Progress(epoch=5), {})
    assert run_folders.epochs_done(folder, config) == 5
    assert run_folders.continued(folder, config, {"epochs": 5}).train.epochs == 5
    for epochs, message in ((4, "5 epochs already"), ("x", "expects an integer"), (0, "must be 1 or more")):
        with pytest.raises(ConfigError, match=message):
            run_folders.continued(folder, config, {"epochs": epochs})
    with pytest.raises(
        ConfigError, match=r"keeps its settings, got seed; of \[train\] it may change epochs, patience, lr"
    ):
        run_folders.continued(folder, config, {"seed": 3})
    save_checkpoint(folder / "checkpoints", Progress(epoch=5, step=3, steps=8), {})
    assert run_folders.continued(folder, config, {"epochs": 6}).train.epochs == 6
    with pytest.raises(ConfigError, match="has trained 5 epochs and 3 steps already"):
        run_folders.continued(folder, config, {"epochs": 5})
    save_checkpoint(folder / "checkpoints", Progress(run=1, epoch=9, finished=[{"seed": 23, "epochs": 9}]), {})
    (folder / "result.json").write_text("{}")
    assert run_folders.continued(folder, config, {"epochs": 9}) == config
    assert run_folders.continued(folder, config, {"epochs": 12}).train.epochs == 12
    new = run_folders.continued(folder, config, {"epochs": 12, "lr": 0.5}).train
    assert (new.lr, new.schedule_start) == (0.5, 9)
    run_folders.reopen(folder, dataclasses.replace(config, train=new))
    assert not run_folders.is_complete(folder)
    assert from_toml(folder / "config.toml").train == new


def test_scores_of_another_store_need_no_labels(run: Path, tmp_path: Path) -> None:
    """Fails if predicting asks for labels or splits, uses the plan of the old graph, or mixes up the order."""
    own = np.load(predicting.predict(run))
    graph = graph_of()
    bare = dataclasses.replace(graph, labels=None, splits={}, num_classes=0)
    write_store(bare, tmp_path / "bare")
    again = np.load(predicting.predict(run, tmp_path / "again.npy", store=tmp_path / "bare"))
    np.testing.assert_allclose(again, own, rtol=1e-6, atol=1e-7)
    assert own.std(0).min() > 0
    # The same numbers of vertices, edges and features, in another order.
    order = np.roll(np.arange(N), 7)
    write_store(reordered(bare, order), tmp_path / "rolled")
    rolled = np.load(predicting.predict(run, tmp_path / "rolled.npy", store=tmp_path / "rolled"))
    np.testing.assert_allclose(rolled, own[order], rtol=1e-4, atol=1e-5)


def reordered(graph: Graph, order: np.ndarray) -> Graph:
    """The same graph with vertex order[i] as its vertex i."""
    import scipy.sparse as sp

    from tests.graphs import csr

    indptr = graph.adj.indptr.read(0, N + 1)
    adj = sp.csr_array((np.ones(indptr[-1]), graph.adj.indices.read(0, indptr[-1]), indptr), shape=(N, N))
    adj = csr(adj[order][:, order])
    assert graph.features is not None
    assert not isinstance(graph.features, CSR)
    return dataclasses.replace(graph, adj=adj, adj_t=adj, features=ArrayRows(graph.features.read(0, N)[order]))


def test_what_predict_refuses(run: Path, tmp_path: Path) -> None:
    """Fails if scores are computed before it is known that they can be written, or from other features."""
    write_store(graph_of(features=6), tmp_path / "wide")
    with pytest.raises(ConfigError, match=r"has 6 features, the run in .* was trained on 5"):
        predicting.predict(run, store=tmp_path / "wide")
    for out in (tmp_path, tmp_path / "nothing" / "scores.npy"):
        with pytest.raises(ConfigError, match="expects a file"):
            predicting.predict(run, out)
    job = json.loads((run / "job.json").read_text())
    (run / "job.json").write_text(json.dumps(job | {"store": None}))
    with pytest.raises(RunError, match="graph in memory; name the store"):
        predicting.predict(run)


def test_signals_set_the_flag_once_and_handlers_return() -> None:
    """Fails if a second signal is swallowed, or the handlers stay after training."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with local_ranks.signalled_stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    seen = []

    def elsewhere() -> None:
        with local_ranks.signalled_stop():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before[1]]


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Python's handlers, whatever the process that runs the tests has."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
def test_before_the_first_epoch_a_signal_is_obeyed_at_once(tmp_path: Path) -> None:
    """Fails if set-up is deaf to signals, or leaves the folder of a run that never began."""
    with pytest.raises(Interrupted, match="SIGTERM"), local_ranks.signalled_stop(saves=False):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), local_ranks.signalled_stop(saves=False):
        os.kill(os.getpid(), signal.SIGINT)
    with local_ranks.signalled_stop(saves=False) as stop:
        stop.saves = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
    for error in (Interrupted(15), KeyboardInterrupt()):
        folder = run_folders.make_run_folder(config_of(), "any", tmp_path / "run")
        with pytest.raises(type(error)), run_folders.discarded_if_refused(folder):
            raise error
        assert not folder.exists()


def test_softmax_of_huge_logits() -> None:
    """Fails if large scores overflow."""
    found = probabilities_of(np.array([[1e30, 0.0], [-1e30, -1e30], [0.0, np.log(3.0)]]), "classes")
    np.testing.assert_allclose(found, [[1, 0], [0.5, 0.5], [0.25, 0.75]])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_shares_out_its_graph_once(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the process that planned a run reads the plan and makes the partition again, or a resumed one does not."""
    made: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs["order"])
        return make_partition(*args, **kwargs)

    monkeypatch.setattr(assemble, "make_partition", counted)
    folder = trained(tmp_path / "store", tmp_path / "run", config_of(ranks))
    assert made == ["random"]
    training.resume_training(folder, run_folders.read_run(folder)[0], open_store(tmp_path / "store"), quiet=True)
    assert made == ["random", "random"]


def test_a_changed_graph_is_refused(run: Path, tmp_path: Path) -> None:
    """Fails if a run is resumed or scores with the plan of a graph that its store no longer holds."""
    for vertices in (N, 3 * N):
        changed = make_graph(pattern("random", vertices, 77), num_features=5, num_classes=3, seed=77)
        write_store(changed, tmp_path / "store", overwrite=True)
        graph = open_store(tmp_path / "store")
        config, _, _ = run_folders.read_run(run)
        with pytest.raises(RunError, match="has changed since"):
            run_folders.known_plan(run, config, graph)
        with pytest.raises(RunError, match="has changed since"):
            predicting.predict(run)
        with pytest.raises(RunError, match="has changed since"):
            training.resume_training(run, config, graph, quiet=True)


def test_changed_settings_are_refused(run: Path, tmp_path: Path) -> None:
    """Fails if an edited config.toml moves vertices to other ranks under a plan that does not know."""
    graph = open_store(tmp_path / "store")
    config, _, _ = run_folders.read_run(run)
    for changed in (
        dataclasses.replace(config, run=dataclasses.replace(config.run, order="permute")),
        dataclasses.replace(config, run=dataclasses.replace(config.run, ranks=3)),
        dataclasses.replace(config, run=dataclasses.replace(config.run, stale_aggregates="reuse")),
        dataclasses.replace(config, train=dataclasses.replace(config.train, seed=24)),
    ):
        with pytest.raises(RunError, match="put it back"):
            run_folders.known_plan(run, changed, graph)
    with pytest.raises(RunError, match=r"asks for delay 2, the run was planned for delay 0; put it back"):
        run_folders.known_plan(run, dataclasses.replace(config, run=dataclasses.replace(config.run, delay="2")), graph)


def test_a_run_of_an_earlier_version_goes_on(run: Path) -> None:
    """Fails if settings that the kind ignores, which earlier versions saved, keep a run from going on or from scoring."""
    path, text = run / "config.toml", (run / "config.toml").read_text()
    path.write_text(text.replace("hops = 0", "hops = 2", 1))
    assert path.read_text() != text
    job = json.loads((run / "job.json").read_text())
    for config in job["configs"]:
        config["model"]["hops"] = 2
    (run / "job.json").write_text(json.dumps(job))
    assert main(["predict", str(run)]) == 0
    assert main(["train", "--resume", str(run), "--epochs", "4", "--quiet"]) == 0
    assert run_folders.read_run(run)[0].model.hops == 0


EDITS = [
    ("lr = 0.01", "lr = 0.5", r"train\.lr 0\.5, it was 0\.01"),
    ("dropout = 0.3", "dropout = 0.2", r"model\.dropout 0\.2, it was 0\.3"),
    ('kind = "gcn"', 'kind = "mlp"', r"model\.kind 'mlp', it was 'gcn'"),
    ('optimizer = "adam"', 'optimizer = "sgd"', r"train\.optimizer 'sgd', it was 'adam'"),
    ('precision = "fp32"', 'precision = "fp64"', r"run\.precision 'fp64', it was 'fp32'"),
]


def test_an_edited_setting_is_named(run: Path) -> None:
    """Fails if a run goes on, or scores, with settings that it did not begin with, or does not say which."""
    path = run / "config.toml"
    text = path.read_text()
    for old, new, message in EDITS:
        path.write_text(text.replace(old, new, 1))
        assert path.read_text() != text
        with pytest.raises(RunError, match=message):
            run_folders.read_run(run)
    for command in (["train", "--resume", str(run), "--epochs", "9"], ["predict", str(run)]):
        assert main(command) == 2
    path.write_text(text)
    assert main(["train", "--resume", str(run), "--epochs", "4", "--quiet"]) == 0
    assert run_folders.read_run(run)[0].train.epochs == 4


def test_settings_of_a_continued_run_are_known_whenever_it_is_killed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run that is killed between the record of new settings and config.toml cannot be resumed."""
    config = run_folders.read_run(run)[0]
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=5))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(run_folders, "to_toml", killed)
            with pytest.raises(KeyboardInterrupt):
                run_folders.reopen(run, longer)
        assert run_folders.read_run(run)[0] == config
    assert main(["train", "--resume", str(run), "--epochs", "5", "--quiet"]) == 0


def test_features_that_change_between_interrupt_and_resume_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a run goes on with other features, whether a bit flipped or the store was written again."""
    path = tmp_path / "store" / "features.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    for command in (["train", "--resume", str(run), "--epochs", "9"], ["predict", str(run)]):
        assert main(command) == 2
        assert "features.npy is damaged" in capsys.readouterr().err
    graph = graph_of()
    assert graph.features is not None
    other = ArrayRows(np.array(graph.features.array()) + 1)  # type: ignore[union-attr]
    write_store(dataclasses.replace(graph, features=other), tmp_path / "store", overwrite=True)
    assert main(["train", "--resume", str(run), "--epochs", "9"]) == 2
    assert "has changed since (features);" in capsys.readouterr().err


def test_plans_of_other_versions_are_refused(run: Path, tmp_path: Path) -> None:
    """Fails if a job.json without names of settings, or a plan without a partition, is blamed on config.toml."""
    graph, config = open_store(tmp_path / "store"), run_folders.read_run(run)[0]
    files = {name: json.loads((run / name).read_text()) for name in ("job.json", "plan.json")}
    older = {"job.json": files["job.json"] | {"assignment": [2, "random", 23]}}
    older["plan.json"] = {key: value for key, value in files["plan.json"].items() if key != "partition"}
    for name, content in older.items():
        (run / name).write_text(json.dumps(content))
        with pytest.raises(RunError, match="another version of mggcn"):
            run_folders.known_plan(run, config, graph)
        (run / name).write_text(json.dumps(files[name]))
    assert run_folders.known_plan(run, config, graph)


def test_a_folder_with_names_of_before_is_read(run: Path, tmp_path: Path) -> None:
    """Fails if a run that was saved before a setting was renamed can no longer be continued."""
    path, job = run / "config.toml", json.loads((run / "job.json").read_text())
    tables = tomllib.loads(path.read_text())
    for before in (tables, *job["configs"]):  # [debug] is a table of later versions
        before["run"] |= {"between": {"discard": "local"}[before["debug"].pop("stale_aggregates")]}
        for name, value in before.pop("debug").items():
            before[DEBUG[name]][name] = value
    path.write_text(tomli_w.dumps(tables))
    job["assignment"]["between"] = {"discard": "local"}[job["assignment"].pop("stale_aggregates")]
    (run / "job.json").write_text(json.dumps(job))
    assert run_folders.known_plan(run, run_folders.read_run(run)[0], open_store(tmp_path / "store"))
    assert main(["train", "--resume", str(run), "--epochs", "9", "--set", "run.bind=off", "--quiet"]) == 0
    assert tomllib.loads(path.read_text())["debug"]["bind"] == "off"


def test_epochs_of_repeats_and_cosine_schedules_stay(tmp_path: Path) -> None:
    """Fails if a continued run mixes repeats of different length, or changes the rates of epochs that are done."""
    for settings in ({"repeat": 2}, {"schedule": "cosine"}):
        config = dataclasses.replace(config_of(), train=TrainConfig(epochs=3, **settings))  # type: ignore[arg-type]
        assert run_folders.continued(tmp_path, config, {"epochs": 3}) == config
        with pytest.raises(ConfigError, match=r"leave train\.epochs"):
            run_folders.continued(tmp_path, config, {"epochs": 4})


def test_scores_that_cannot_be_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a full disk gives a traceback or leaves half a file."""

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "open_memmap", full)
    with pytest.raises(RunError, match="No space left"):
        predicting.predict(run, tmp_path / "scores.npy")
    assert not list(tmp_path.glob("*scores*"))


def test_a_rank_process_multiplies_as_its_precision_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank that is a process trains without the setting of its precision, or leaves it behind."""
    config = Config(run=RunConfig(device="cuda", precision="tf32"))
    seen: list[str] = []
    for name, value in (
        ("read_run", lambda folder: (config, None, {"store": ""})),
        ("open_store", lambda path: None),
        ("known_plan", lambda *_: (None, None)),
        ("train_rank", lambda *_, **__: seen.append(torch.get_float32_matmul_precision())),
    ):
        monkeypatch.setattr(training, name, value)
    before = torch.get_float32_matmul_precision()
    training.train_worker(SingleCommunicator(), Path("none"), quiet=True, started=0.0)
    assert (seen, torch.get_float32_matmul_precision()) == (["high"], before)
    assert before != "high"


@pytest.fixture(scope="module")
def typed_pair() -> tuple[Graph, Graph]:
    """Two random graphs with types and features of one kind, of different sizes; the second without labels and splits."""
    graphs = []
    for n, seed in ((41, 3), (67, 4)):
        rng = np.random.default_rng(seed)
        arrays: dict[str, Any] = {
            "edges": rng.integers(0, n, (2, 5 * n)),
            "edge_types": rng.integers(0, 3 if n == 41 else 2, 5 * n),
            "features": rng.normal(size=(n, 5)).astype(np.float32),
            "num_vertices": n,
        }
        if n == 41:
            arrays |= {"labels": rng.integers(0, 3, n), "splits": {"train": rng.random(n) < 0.6}}
        graphs.append(from_arrays(**arrays))
    return graphs[0], graphs[1]


MODELS = [{"kind": "gcn"}, {"kind": "rgcn", "bases": 2}]
RUNS = [
    {"ranks": 1, "order": "auto", "strategy": "auto"},
    {"ranks": 2, "order": "auto", "strategy": "auto"},
    {"ranks": 3, "order": "locality", "strategy": "halo"},
    {"ranks": 2, "strategy": "delayed"},
]


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("settings", RUNS, ids=str)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_scores_of_a_graph_of_another_size(
    typed_pair: tuple[Graph, Graph], model: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Fails if a partition, an order, a size or the number of relations of the trained graph is kept for another one."""
    first, second = typed_pair
    write_store(second, tmp_path / "second")
    description = ModelConfig(hidden=(6,), **model)
    run = {"threads": 1, "precision": "fp64", "transport": "threads" if settings["ranks"] > 1 else "single"}
    trainer = Trainer(first, description, out=tmp_path / "run", **run, **settings)
    trainer.fit(epochs=2)
    expected = trainer.predict(graph=second)
    # What the weights give where that graph is the trainer's own.
    labelled = dataclasses.replace(
        second,
        labels=ArrayRows(np.zeros(67, np.int64)),
        splits={"train": ArrayRows(np.ones((1, 67), np.bool_))},
        num_classes=3,
        num_relations=first.num_relations,
    )
    own = Trainer(labelled, description, threads=1, precision="fp64").scores_of(trainer.state_dict())
    np.testing.assert_allclose(expected, own, rtol=1e-9, atol=1e-12)
    scores = np.load(predicting.predict(tmp_path / "run", tmp_path / "s.npy", store=tmp_path / "second"))
    np.testing.assert_allclose(scores, own, rtol=1e-9, atol=1e-12)
    if model["kind"] == "rgcn":
        with pytest.raises(ConfigError, match="has 4 relations, the run was trained on 3"):
            trainer.predict(graph=dataclasses.replace(second, num_relations=4))
