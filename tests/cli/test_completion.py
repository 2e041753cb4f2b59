"""`mggcn completion`: what bash completes for real, and scripts that every shell here takes."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from mggcn.graph.named.catalogue import DATASETS
from tests.cli.runs import refused, run_main


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script of bash."""
    assert run_main("completion", "bash") == 0
    (tmp_path / "mggcn.bash").write_text(capsys.readouterr().out)
    return tmp_path / "mggcn.bash"


def completed(script: Path, line: str, breaks: str = " \t\n\"'><=;|&(:") -> list[str]:
    """What bash puts in the place of the word at the end of a line, whose words it splits as in its prompt."""
    words = line.replace("=", " = ").split(" ") if "=" in breaks else line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words if word or word is words[-1])
    program = f"""
source '{script}'
COMP_WORDBREAKS=$'{breaks.encode("unicode_escape").decode().replace("'", chr(92) + "'")}'
COMP_WORDS=({quoted}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMP_LINE='{line}'; COMP_POINT={len(line)}
[[ "$(complete -p mggcn)" =~ -F\\ ([^ ]*) ]] && "${{BASH_REMATCH[1]}}" mggcn "${{COMP_WORDS[COMP_CWORD]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = ["bash", "--norc", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=script.parent)
    assert not done.stderr
    return sorted(done.stdout.split())


CASES: dict[str, list[str]] = {
    "mggcn tr": ["train"],
    "mggcn help pre": ["predict", "prepare"],
    "mggcn store ve": ["verify"],
    "mggcn train --de": ["--delay", "--device"],
    "mggcn doctor --": ["--help", "--json", "--quick"],
    "mggcn train --device c": ["cpu", "cuda"],
    "mggcn plan g --strategy h": ["halo"],
    "mggcn train --set model.ki": ["model.kind="],
    "mggcn sweep grid.toml g --set train.lo": ["train.loss="],
    "mggcn train --set model.kind=s": ["sage", "sgc"],
    "mggcn train --set=run.order=m": ["metis", "metis-balanced"],
    "mggcn tune --store g --set model.bias=t": ["true"],
    "mggcn train --set model.hidden=": [],
    "mggcn settings train.lr": ["train.lr"],
    "mggcn predict run --weights b": ["best"],
    "mggcn completion f": ["fish"],
    "mggcn train sto": ["stores"],
    "mggcn train pub": ["pubmed"],
    "mggcn status sto": ["stores"],
    "mggcn train --config gr": ["grid.toml"],
}


@pytest.mark.parametrize("line", CASES)
def test_bash_completes(line: str, script: Path) -> None:
    """Fails if bash offers something else than the command takes at this place."""
    (script.parent / "stores").mkdir()
    (script.parent / "grid.toml").touch()
    assert completed(script, line) == CASES[line]


def test_bash_completes_every_data_set_and_what_it_does_not_split(script: Path) -> None:
    """Fails if a data set is left out, or a prompt that does not split words at = loses the setting."""
    assert set(DATASETS) <= set(completed(script, "mggcn datasets "))
    assert completed(script, "mggcn train --set run.device=c", " \t\n") == ["run.device=cpu", "run.device=cuda"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_all_words(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a script of zsh or fish lacks commands, settings or values, or the shell, if it is here, cannot read it."""
    assert run_main("completion", shell) == 0
    text = capsys.readouterr().out
    for word in ("store", "verify", "--memory-limit", "model.kind=", "gatv2", "ogbn-arxiv", "train.lr"):
        assert word in text.replace("\\", "").replace("-l memory-limit", "--memory-limit")
    (tmp_path / "script").write_text(text)
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n", str(tmp_path / "script")], timeout=30).returncode == 0


def test_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if fish offers something else than the command takes at this place."""
    if (fish := shutil.which("fish")) is None:
        pytest.skip("needs fish")
    assert run_main("completion", "fish") == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    for line, words in {"mggcn tr": ["train"], "mggcn train --set model.kind=sa": ["model.kind=sage"]}.items():
        command = [fish, "--no-config", "-c", f"source {tmp_path / 'script'}; complete -C '{line}'"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=tmp_path)
        assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == words


def test_what_cannot_be_completed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if another shell, or a missing package, ends in a traceback or without a way on."""
    assert "did you mean bash?" in refused(capsys, "completion", "bsh")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'pip install "mggcn[completion]"' in refused(capsys, "completion", "bash")
