"""Tables of measured variants of sparse products: written, read back, kept apart by host, refused if damaged."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mggcn.assemble.plan import host_of
from mggcn.backend.cpu.machine import Host
from mggcn.backend.cuda import presence as cuda_presence
from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey
from mggcn.errors import BackendError, StoreError
from mggcn.runs.product_table import (
    FORMAT_VERSION,
    REMEDY,
    check_writable,
    outdated,
    read_choices,
    write_choices,
)
from tests.runs.small import config_of, store_of, trained

HERE = Host("a processor", "avx2", 2, "0-1")
KEY, OTHER = SpmmKey(10, 20, 300, 16, 4, True, "a"), SpmmKey(10, 20, 300, 16, 4, True, "b")
PANELS, AHEAD = SpmmChoice("panels", 32, 1, 32, "measured"), SpmmChoice(ahead=16, reason="measured")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Fails if a table loses a product, keeps an older variant of one, or a new one drops the old ones."""
    path = tmp_path / "tuned.json"
    assert read_choices(path, HERE) == {}
    write_choices(path, HERE, {KEY: PANELS})
    assert read_choices(path, HERE) == {KEY: PANELS}
    write_choices(path, HERE, {OTHER: AHEAD})
    assert read_choices(path, HERE) == {KEY: PANELS, OTHER: AHEAD}
    write_choices(path, HERE, {KEY: AHEAD})
    assert read_choices(path, HERE) == {KEY: AHEAD, OTHER: AHEAD}
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize(
    "change", [{"processor": "another"}, {"kernels": "baseline"}, {"threads": 1}, {"cores": "2-3"}]
)
def test_another_host_has_a_table_of_its_own(tmp_path: Path, change: dict[str, object]) -> None:
    """Fails if what was measured elsewhere, or with other threads, is taken here, or is lost when this host writes."""
    path, elsewhere = tmp_path / "tuned.json", dataclasses.replace(HERE, **change)  # type: ignore[arg-type]
    write_choices(path, elsewhere, {KEY: PANELS})
    assert read_choices(path, HERE) == {}
    write_choices(path, HERE, {KEY: AHEAD})
    assert (read_choices(path, elsewhere), read_choices(path, HERE)) == ({KEY: PANELS}, {KEY: AHEAD})


def test_damaged_tables_are_refused(tmp_path: Path) -> None:
    """Fails if a damaged file is a traceback, is silently taken for an empty one, or cannot be replaced."""
    path = tmp_path / "tuned.json"
    write_choices(path, HERE, {KEY: PANELS})
    whole = json.loads(path.read_text())
    no_version = whole | {"format_version": "3"}
    no_host = whole | {"tables": [{"products": []}]}
    odd_key = json.loads(path.read_text().replace('"rows": 10', '"lines": 10'))
    odd_variant = json.loads(path.read_text().replace('"panel"', '"pane"'))
    for text in ("{", "[]", *map(json.dumps, (no_version, no_host, odd_key, odd_variant))):
        path.write_text(text)
        with pytest.raises(StoreError, match=r"tuned\.json.*measure again with mggcn tune --store, or remove the file"):
            read_choices(path, HERE)
        write_choices(path, HERE, {KEY: AHEAD})
        assert read_choices(path, HERE) == {KEY: AHEAD}
    with pytest.raises(StoreError, match="cannot be written"):
        write_choices(tmp_path / "missing" / "tuned.json", HERE, {KEY: PANELS})


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"blocks": 1', '"blocks": 0', "blocks must be a whole number in 1 .. .*, got 0"),
        ('"blocks": 1', '"blocks": 18446744073709551617', "blocks must be"),
        ('"blocks": 1', '"blocks": true', "blocks must be .*, got True"),
        ('"blocks": 1', '"blocks": 4', "panels do not go with panels of 32 columns and 4 blocks"),
        ('"panel": 32', '"panel": -32', "panel must be .*, got -32"),
        ('"panel": 32', '"panel": 0', "panels do not go with panels of 0 columns"),
        ('"ahead": 32', '"ahead": 1.5', "ahead must be .*, got 1.5"),
        ('"way": "panels"', '"way": "colums"', "way must be one of rows, panels, blocks, got 'colums'"),
        ('"way": "panels"', '"way": ["rows"]', r"got \['rows'\]"),
        ('"nnz": 300', '"nnz": "many"', "nnz must be .*, got 'many'"),
        ('"summed": true', '"summed": "yes"', "summed must be true or false"),
    ],
)
def test_variants_that_compute_something_else_are_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    """Fails if a number that kernels do not check, such as no blocks at all, reaches them, or is a traceback."""
    path = tmp_path / "tuned.json"
    write_choices(path, HERE, {KEY: PANELS})
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(StoreError, match=named) as refused:
        read_choices(path, HERE)
    assert REMEDY in str(refused.value)


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_a_table_of_another_version_is_as_good_as_none(tmp_path: Path, version: int) -> None:
    """Fails if variants of other kernels are taken, stop a run, or stay beside new ones, or nobody can say so."""
    path = tmp_path / "tuned.json"
    assert outdated(path) == ""
    write_choices(path, HERE, {KEY: PANELS})
    assert outdated(path) == ""
    path.write_text(json.dumps({"format_version": version, "tables": {"whatever": "that version has"}}))
    assert read_choices(path, HERE) == {}
    assert f"tuned.json holds measured products of format {version}" in outdated(path)
    write_choices(path, HERE, {OTHER: AHEAD})
    assert (read_choices(path, HERE), outdated(path)) == ({OTHER: AHEAD}, "")
    path.write_text("{")
    assert outdated(path) == "", "damaged, which reading it says"


def test_writers_at_the_same_time(tmp_path: Path) -> None:
    """Fails if a writer dies of another, a reader sees half a table, or a temporary file stays."""
    path = tmp_path / "tuned.json"
    keys = [dataclasses.replace(KEY, width=width) for width in range(1, 41)]
    errors: list[BaseException] = []
    writing = threading.Event()

    def write(host: Host) -> None:
        try:
            for key in keys:
                write_choices(path, host, {key: PANELS})
                check_writable(path)
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            while not writing.is_set():
                assert read_choices(path, HERE).keys() <= set(keys)
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(dataclasses.replace(HERE, threads=k),)) for k in (2, 2, 3)]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    writing.set()
    reader.join()
    assert errors == []
    assert read_choices(path, HERE) or read_choices(path, dataclasses.replace(HERE, threads=3)), (
        "the last one's are there"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.json"]


def test_a_table_that_cannot_take_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the last step of writing is a traceback, or leaves its temporary file behind."""
    path = tmp_path / "tuned.json"

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StoreError, match=r"cannot be written to .*tuned\.json: No space left"):
        write_choices(path, HERE, {KEY: PANELS})
    assert list(tmp_path.iterdir()) == []


def test_what_a_gpu_has_measured_belongs_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if slices that were timed on a GPU are read on another, or on a CPU, or a machine without one has a name."""
    with pytest.raises(BackendError, match=r"run\.device cuda"):
        host_of(config_of(1, device="cuda"))
    monkeypatch.setattr(cuda_presence, "missing_for_cuda", lambda: "")
    key = SpmmKey(1, 1, 1, 33, 4, True, "")
    for processors in (132, 114):
        figures = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, figures=figures: figures)
        host = host_of(config_of(1, device="cuda"))
        assert (host.processor, host.kernels, host.threads) == ("a GPU", "sm_90", processors)
        assert read_choices(tmp_path / "tuned.json", host) == {}
        write_choices(tmp_path / "tuned.json", host, {key: SpmmChoice("panels", 32)})
        assert read_choices(tmp_path / "tuned.json", host) == {key: SpmmChoice("panels", 32)}
    assert read_choices(tmp_path / "tuned.json", host_of(config_of(1))) == {}


def test_a_table_of_another_version_does_not_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run refuses a table of older kernels, takes variants from it, or does not say that it leaves it aside."""
    graph = store_of(tmp_path)
    table = tmp_path / "store" / "tuned.json"
    table.write_text(json.dumps({"format_version": FORMAT_VERSION - 1, "tables": []}))
    folder = trained(graph, config_of(2), tmp_path / "run")
    said = capsys.readouterr().out
    assert said.count(f"{table} holds measured products of format {FORMAT_VERSION - 1}") == 1
    assert not (folder / "products.json").exists()
