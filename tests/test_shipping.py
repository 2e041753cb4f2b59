"""What ships mggcn: the installed CUDA sources, the Dockerfile and what enters its build. No container engine is needed."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), " ".join(rest.split())) for word, rest in found]


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of every stage; what stands before the first FROM is left out."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def runs(stage: list[tuple[str, str]]) -> list[str]:
    return [rest for word, rest in stage if word == "RUN"]


def test_cuda_sources_are_installed() -> None:
    """Fails if CMakeLists.txt installs a pattern too few: the kernels would be missing from every wheel."""
    try:
        installed = Path(str(metadata.distribution("mggcn").locate_file("mggcn/cuda")))
    except metadata.PackageNotFoundError:
        pytest.skip("mggcn is not installed here")
    sources = {path.name for path in (ROOT / "cuda").iterdir() if path.is_file()}
    assert {path.name for path in installed.iterdir()} >= sources, "reinstall: pip install --no-build-isolation -e ."


def test_arguments_of_images_are_declared_before_them() -> None:
    """An image's name sees only what stands before the first FROM; a stage must name again what it uses itself."""
    before = instructions()[: [word for word, _ in instructions()].index("FROM")]
    known = {rest.partition("=")[0]: rest.partition("=")[2] for word, rest in before if word == "ARG"}
    assert re.fullmatch(r"13\.\d+\.\d+", known["CUDA_VERSION"])
    images = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    for image in images:
        assert set(re.findall(r"\$\{(\w+)\}", image)) <= set(known)
        assert ":" in image, "a pinned image"
    assert images[-1].startswith("nvidia/cuda:${CUDA_VERSION}-base-")
    declared = {rest.partition("=")[0] for word, rest in stages()[-1] if word == "ARG"}
    used = set(re.findall(r"\$\{(\w+)", " ".join(runs(stages()[-1]))))
    assert used <= declared


def test_no_index_is_named() -> None:
    """Where packages come from is the builder's to say: such arguments have no default, and no host is written down."""
    arguments = [rest for word, rest in instructions() if word == "ARG" and "INDEX" in rest]
    assert set(arguments) == {"PIP_INDEX_URL", "TORCH_INDEX_URL"}
    assert "://" not in (ROOT / "Dockerfile").read_text()


def test_torch_is_installed_once_and_held() -> None:
    """Fails if a later step could replace torch, or bring a build for another CUDA unnoticed."""
    commands = [c for run in runs(stages()[-1]) for c in run.split(" && ") if "pip install" in c]
    assert [bool(re.search(r'"torch\$', command)) for command in commands] == [True, False]
    assert "--constraint /opt/mggcn/torch.txt" in commands[1]
    assert "cupy-cuda${CUDA_VERSION%%.*}x" in commands[1]
    assert "torch.version.cuda" in runs(stages()[-1])[1]
    assert not re.search(r"nccl|cudnn|nvidia-", " ".join(runs(stages()[-1])))


def test_the_check_of_torchs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of Python in the Dockerfile ends well for the image's major version, and else says what to pass."""
    import torch

    run = runs(stages()[-1])[1]
    code = shlex.split(next(command for command in run.split(" && ") if command.startswith("python -c")))[2]
    for built, image, fine in (("13.0", "13.0.2", True), ("12.8", "13.0.2", False), (None, "12.6.3", False)):
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr("sys.argv", ["-c", image])
        with pytest.raises(SystemExit) as end:
            exec(code, {})
        assert (end.value.code is None) is fine
        assert fine or "TORCH_INDEX_URL" in str(end.value.code)


def test_the_image_has_no_compiler_and_no_root() -> None:
    last = stages()[-1]
    assert not re.search(r"\b(g\+\+|gcc|build-essential|cmake)\b", " ".join(runs(last)))
    users = [rest for word, rest in last if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    assert f"useradd --create-home --uid 1010 {users[-1]}" in " ".join(runs(last))
    words = [word for word, _ in last]
    assert max(i for i, word in enumerate(words) if word == "RUN") < words.index("USER"), "root's work comes before"


def test_entry_and_health_check() -> None:
    last = dict(stages()[-1])
    assert last["ENTRYPOINT"] == '["mggcn"]'
    assert last["CMD"] == '["doctor"]'
    assert last["HEALTHCHECK"].endswith('CMD ["mggcn", "doctor", "--quick"]')


def test_what_is_copied_exists_and_enters_the_build() -> None:
    """Fails if a COPY names what .dockerignore keeps out, or if a file that the build reads is not copied."""
    copied = [source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(copied)
    readme = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    built = re.findall(r"\b(cpu|cuda)/", (ROOT / "CMakeLists.txt").read_text())
    assert {readme, "mggcn", *built} <= set(copied)


def test_lists_of_packages_in_apt_are_removed() -> None:
    for run in (run for stage in stages() for run in runs(stage) if "apt-get install" in run):
        assert run.startswith("apt-get update && ")
        assert "--no-install-recommends" in run
        assert run.endswith("rm -rf /var/lib/apt/lists/*")


def test_messages_in_the_guide_are_those_of_the_program() -> None:
    """Fails if a message is reworded and docs/install.md still quotes the old one."""
    errors = (ROOT / "docs" / "install.md").read_text().partition("## Common errors")[2]
    quoted = re.findall(r"^\| `([^`]+)`", errors, re.MULTILINE)
    sources = [ROOT / "CMakeLists.txt", *(ROOT / "mggcn").rglob("*.py")]
    text = " ".join(path.read_text() for path in sources)
    assert len(quoted) > 10
    assert [message for message in quoted if message not in text] == []


def test_what_the_guides_name_exists() -> None:
    """Fails on a build argument, a test, a script or a page that is not there."""
    guides = "".join((ROOT / "docs" / name).read_text() for name in ("install.md", "gpu.md"))
    arguments = {rest.partition("=")[0] for word, rest in instructions() if word == "ARG"}
    assert set(re.findall(r"--build-arg (\w+)=|^\| `([A-Z_]+)` \|", guides, re.MULTILINE)) <= {
        *((name, "") for name in arguments),
        *(("", name) for name in arguments),
    }
    named = set(re.findall(r"\b(?:tests|bench)/[\w/]+(?:\.py)?", guides))
    links = set(re.findall(r"\]\(([^)#]+)\)", guides))
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert [path for path in links if not (ROOT / "docs" / path).exists()] == []
    parts = {part for found in re.findall(r"--parts ([\w,]+)", guides) for part in found.split(",")}
    assert parts <= set(re.findall(r"\"(\w+)\"", (ROOT / "bench" / "gpu" / "tasks.py").read_text()))


def test_every_extra_is_used() -> None:
    """Fails if an extra installs what the package never names."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = "\n".join(path.read_text() for path in (ROOT / "mggcn").rglob("*.py"))
    for name, packages in extras.items():
        imported = [re.split(r"[>=\[-]", package)[0] for package in packages]
        assert any(re.search(rf"\b{package}\b", code) for package in imported), name
