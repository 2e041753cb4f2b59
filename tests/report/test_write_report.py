"""mggcn.report.write_report on whole run folders."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mggcn.errors import BackendError, RunError
from mggcn.report import markup, write_report
from mggcn.report.scores import _repeats
from tests.report.run_folders import HOSTILE, make_plan, write_run

_VOID = {"meta", "img", "br"}
SCRIPT = Path(markup.__file__).with_name("page.js")


class Page(HTMLParser):
    """Checks that tags balance and collects what a browser would load, run or show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loaded: list[str] = []
        self.shown: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value or "" for key, value in attrs if key in ("src", "href", "data", "action")]
        assert not [key for key, _ in attrs if key.startswith("on")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.shown.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.shown)


def report(run: Path) -> Page:
    """Write the report, check the files and return the page."""
    paths = write_report(run)
    several = json.loads((run / "plan.json").read_text())["ranks"] > 1
    pictures = ["curves.png", "memory.png", *["tiles.png"] * several]
    assert [path.name for path in paths] == [*pictures, "index.html"]
    images = [path.read_bytes() for path in paths[:-1]]
    assert all(image.startswith(b"\x89PNG\r\n") and len(image) > 5000 for image in images)
    page = checked(paths[-1])
    assert [base64.b64decode(src.removeprefix("data:image/png;base64,")) for src in page.loaded] == images[1:]
    return page


def checked(path: Path) -> Page:
    """Return a page that loads nothing and runs one script, ours, which its policy names by hash."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.scripts == [SCRIPT.read_text(encoding="utf-8")]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.read_bytes()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in text
    assert "link" not in page.tags
    assert "url(" not in text
    return page


def test_one_rank(tmp_path: Path) -> None:
    """Fails if sizes or settings are missing, or tiles are shown of a rank that shares with none."""
    page = report(write_run(tmp_path / "run"))
    assert "arxiv: gcn" in page.text
    assert "Tiles" not in page.text
    assert "1.15 GiB" in page.text, "planned peak"
    assert "169,343" in page.text, "rows of a buffer"
    assert "layer 2: gemm-first, 256 -> 256 columns through the graph" in page.text
    assert "interrupted" not in page.text
    for setting in ("weight_decay_on", "256,256", "graph sha256", "ab" * 32):
        assert setting in page.text


@pytest.mark.covering(0)
@pytest.mark.parametrize(("transport", "whose"), [("gloo", "(largest rank)"), ("threads", "(all ranks)")])
def test_the_page_says_whose_peaks_it_shows(tmp_path: Path, transport: str, whose: str) -> None:
    """Fails if the peak of one process passes for that of a run on several."""
    run = write_run(tmp_path / "run", ranks=2)
    with (run / "config.toml").open() as file:
        settings = file.read().replace('transport = "auto"', f'transport = "{transport}"')
    (run / "config.toml").write_text(settings)
    text = report(run).text
    assert f"peak memory, planned {whose}" in text
    assert f"peak memory, measured {whose}" in text
    assert "arena (rank 0)" in text


@pytest.mark.full
def test_four_ranks_and_rare_evaluations(tmp_path: Path) -> None:
    """A second report replaces the first, with the same bytes."""
    run = write_run(tmp_path / "run", ranks=4, every=7)
    page = report(run)
    first = (run / "report" / "index.html").read_bytes()
    report(run)
    assert (run / "report" / "index.html").read_bytes() == first
    assert "4 ranks on cpu" in page.text
    assert "Rows that each rank needs of each other" in page.text


@pytest.mark.full
def test_repeats(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", ranks=2, repeats=3))
    assert "3 runs" in page.text
    assert "run 2" in page.text
    assert re.search(r"mean\n+\s*test 0\.7\d+", page.text)


def test_repeats_whose_result_holds_plain_numbers() -> None:
    shown = _repeats({"metric": "roc_auc", "runs": [0.5, 0.75], "mean": 0.625, "std": 0.125})
    assert [number in shown for number in ("0.5000", "0.7500", "0.6250", "0.1250")] == [True] * 4


@pytest.mark.covering(0)
@pytest.mark.parametrize(("task", "matrix"), [("classes", True), ("classes", False), ("labels", False)])
def test_scores_of_each_class(tmp_path: Path, task: str, matrix: bool) -> None:
    """Fails if the page leaves out a split or a class, shows a matrix that is not there, or calls labels classes."""
    run = write_run(tmp_path / "run")
    scores = {"precision": [0.125, 1.0], "recall": [0.25, 0.0], "f1": [0.5, 0.0], "support": [7, 1234]}
    split = scores | ({"confusion": [[3, 4], [5, 9876]]} if matrix else {})
    for file, change in (("result.json", {"per_class": {"train": split, "test": split}}), ("plan.json", {})):
        content = json.loads((run / file).read_text()) | change
        if file == "plan.json":
            content["graph"]["task"] = task
        (run / file).write_text(json.dumps(content))
    text = report(run).text
    one = "label" if task == "labels" else "class"
    assert f"Scores of each {one}" in text
    assert [text.count(shown) for shown in ("1,234", "9,876")] == [2, 2 * matrix]
    assert ("train vertices" in text, "val vertices" in text) == (True, False)
    assert ("too many classes" in text) == (task == "classes" and not matrix)


@pytest.mark.parametrize(
    ("names", "shown"),
    [(["red <b>", "blue"], ("red <b>", "blue")), (["red"], ("0", "1")), ("ab", ("1",))],
)
def test_classes_have_their_names(tmp_path: Path, names: object, shown: tuple[str, ...]) -> None:
    """Fails if the page numbers classes that have names, or takes names that are not one for each."""
    run = write_run(tmp_path / "run")
    scores = {"precision": [0.1, 1.0], "recall": [0.2, 0.0], "f1": [0.5, 0.0], "support": [7, 12]}
    changes = {
        "result.json": {"per_class": {"test": scores | {"confusion": [[3, 4], [5, 6]]}}},
        "plan.json": {"class_names": names},
    }
    for file, change in changes.items():
        (run / file).write_text(json.dumps(json.loads((run / file).read_text()) | change))
    page = report(run)
    assert [name for name in shown if page.shown.count(name) < 3] == []
    assert ("red <b>" in page.text) == (shown[0] == "red <b>")


@pytest.mark.full
def test_interrupted_run_gets_curves_and_a_note(tmp_path: Path) -> None:
    """The last line of the history may be torn; without result.json the validation scores name the best epoch."""
    run = write_run(tmp_path / "run", finished=False)
    with (run / "history.jsonl").open("a") as file:
        file.write('{"epoch": 61, "lo')
    page = report(run)
    assert "This run was interrupted: result.json is missing. The curves end at epoch 60" in page.text
    assert "The last line of history.jsonl is incomplete" in page.text


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    """Fails if a name reaches the page as markup or matplotlib as a formula or a glyph it lacks (a warning)."""
    run = write_run(tmp_path / "run", name=HOSTILE, epochs=3)
    plan = make_plan(1, name=HOSTILE)
    plan["programs"]["train"][3] = HOSTILE
    plan["reasons"].append(HOSTILE)
    plan["per_rank"][0]["regions"][HOSTILE] = 10**9
    plan["per_rank"][0]["buffers"][0] |= {"name": HOSTILE, "lifetime": HOSTILE}
    (run / "plan.json").write_text(json.dumps(plan))
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"metric": HOSTILE, "versions": {HOSTILE: HOSTILE}}))
    (run / "config.toml").write_text(f"[train]\nepochs = 3\n[{json.dumps(HOSTILE)}]\nx = {json.dumps(HOSTILE)}\n")
    page = report(run)
    assert page.text.count(HOSTILE.replace("\x07", "\ufffd")) >= 10
    assert "\x07" not in page.text


def test_matplotlib_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", epochs=3)
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendError, match=r'pip install "mggcn\[report\]"'):
        write_report(run)
    assert not (run / "report").exists()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=3)
    (run / "report").write_text("a file is in the way")
    with pytest.raises(RunError, match="cannot write the report"):
        write_report(run)


@pytest.mark.full
def test_needs_neither_torch_nor_pyplot(tmp_path: Path) -> None:
    """Importing the room loads nothing; reporting loads no torch and leaves pyplot's global state alone."""
    run = write_run(tmp_path / "run", epochs=3)
    code = (
        "import sys; from pathlib import Path; from mggcn.report import write_report\n"
        "heavy = {'matplotlib', 'numpy', 'torch'} & set(sys.modules)\n"
        f"write_report(Path({str(run)!r}))\n"
        "print(sorted(heavy), sorted({'torch', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[] []", "")
