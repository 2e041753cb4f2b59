"""What ships mggcn: installed CUDA sources, Dockerfiles, recipe and release workflow. No container engine is needed."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import mggcn

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


GPU, CPU = "Dockerfile", "Dockerfile.cpu"
BOTH = pytest.mark.parametrize("file", [GPU, CPU])


def instructions(file: str = GPU) -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, continued lines joined."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), " ".join(rest.split())) for word, rest in found]


def stages(file: str = GPU) -> list[list[tuple[str, str]]]:
    """The instructions of every stage; what stands before the first FROM is left out."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions(file):
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


@BOTH
def test_no_index_is_named_and_no_password_stays(file: str) -> None:
    """Fails if a host is written down, or an index whose address may hold a password is an argument: images keep those."""
    arguments = [rest for word, rest in instructions(file) if word == "ARG" and "INDEX" in rest]
    assert arguments == ["TORCH_INDEX_URL"]
    assert "://" not in (ROOT / file).read_text()
    pips = [run for stage in stages(file) for run in runs(stage) if re.search(r"\bpip (install|wheel)", run)]
    assert len(pips) == 3
    assert all("--mount=type=secret,id=pip,target=/etc/pip.conf " in run for run in pips)


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


@BOTH
def test_the_image_has_no_compiler_and_no_root(file: str) -> None:
    """Fails if the image has what only its build needs, or runs as root."""
    last = stages(file)[-1]
    assert not re.search(r"\b(g\+\+|gcc|build-essential|cmake|python3-dev)\b", " ".join(runs(last)))
    users = [rest for word, rest in last if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    assert f"useradd --create-home --uid 1010 {users[-1]}" in " ".join(runs(last))
    words = [word for word, _ in last]
    assert max(i for i, word in enumerate(words) if word == "RUN") < words.index("USER"), "root's work comes before"


@BOTH
def test_entry_health_check_labels_and_extras(file: str) -> None:
    """Fails if nothing reaps processes, an extra that a command needs is missing, or the label has another version."""
    last = dict(stages(file)[-1])
    assert last["ENTRYPOINT"] == '["tini", "--", "mggcn"]'
    assert any(re.search(r"\btini\b", run) for run in runs(stages(file)[-1]))
    assert last["CMD"] == '["doctor"]'
    assert last["HEALTHCHECK"].endswith('CMD ["mggcn", "doctor", "--quick"]')
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', last["LABEL"]))
    assert labels.keys() == {"title", "description", "version", "licenses"}
    assert (labels["version"], labels["licenses"]) == (PROJECT["version"], PROJECT["license"]["text"])
    (extras,) = re.findall(r'mggcn-\*\.whl\)\[([\w,]+)\]"', " ".join(runs(stages(file)[-1])))
    wanted = set(PROJECT["optional-dependencies"]) - {"cuda12", "cuda13", "pyg", "notebook"}
    assert set(extras.split(",")) >= {"report", "tensorboard", "metis", "parquet", "zstd", "ogb"}
    assert set(extras.split(",")) <= wanted
    metis = PROJECT["optional-dependencies"]["metis"][0]
    assert f'"{metis}"' in runs(stages(file)[0])[-1]


def test_what_is_copied_exists_and_enters_the_build() -> None:
    """Fails if a COPY names what .dockerignore keeps out, or if a file that the build reads is not copied."""
    copied = {
        source
        for file in (GPU, CPU)
        for word, rest in instructions(file)
        if word == "COPY"
        for source in rest.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied
    built = re.findall(r"\b(cpu|cuda)/", (ROOT / "CMakeLists.txt").read_text())
    assert {PROJECT["readme"], "mggcn", *built} <= copied


@BOTH
def test_lists_of_packages_in_apt_are_removed(file: str) -> None:
    for run in (run for stage in stages(file) for run in runs(stage) if "apt-get install" in run):
        assert run.startswith("apt-get update && ")
        assert "--no-install-recommends" in run
        assert run.endswith("rm -rf /var/lib/apt/lists/*")


def test_the_conda_recipe_is_that_of_the_project() -> None:
    """Fails if the recipe builds another version, or runs with other packages than pyproject.toml asks for."""
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == PROJECT["version"]
    renamed = [re.sub(r"^torch(?=\W)", "pytorch", package) for package in PROJECT["dependencies"]]
    needs = [f"python{PROJECT['requires-python']}", *renamed]
    assert [package.replace(" ", "") for package in recipe["requirements"]["run"]] == needs
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert set(built) <= {package.replace(" ", "") for package in recipe["requirements"]["host"]}
    assert recipe["build"]["python"]["entry_points"] == [f"{k} = {v}" for k, v in PROJECT["scripts"].items()]
    assert (ROOT / recipe["about"]["license_file"]).exists()


def test_the_version_is_the_same_everywhere() -> None:
    """Fails if a release would build one version and cite, or report, another."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert {cited, mggcn.__version__} == {PROJECT["version"]}
    _, unreleased, latest, *_ = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    assert unreleased.startswith("Unreleased\n")
    assert latest.startswith(f"{PROJECT['version']} - ")
    assert unreleased.count("\n") < 150, "cut a release; or a merge brought back what the last one has summed up"


def test_a_person_publishes_and_nothing_else_may() -> None:
    """Fails if a push publishes, a job may do more than it needs, or an action is whatever its tag points to today."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert list(workflow[True]) == ["workflow_dispatch"]  # YAML 1.1 reads `on` as true
    assert workflow[True]["workflow_dispatch"]["inputs"]["publish"]["default"] is False
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"}
    }
    assert (jobs["publish"]["if"], jobs["publish"]["environment"]) == ("inputs.publish", "release")
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []
    assert "secrets." not in text
    assert "pipx run cibuildwheel==" in text


def test_the_steps_of_an_image_are_read_as_they_stand() -> None:
    """Fails if the script that runs the steps of Dockerfile.cpu misses one, or does not know an instruction."""
    script = runpy.run_path(str(ROOT / "packaging" / "try_cpu_image.py"))
    assert script["instructions"]((ROOT / CPU).read_text()) == instructions(CPU)
    known = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "ENTRYPOINT", "CMD", "HEALTHCHECK", "LABEL"}
    assert {word for word, _ in instructions(CPU)} <= known
    found, command = script["mounts"](runs(stages(CPU)[-1])[2])
    assert [mount["type"] for mount in found] == ["bind", "secret"]
    assert command.startswith("pip install ")
    assert script["substituted"]("${A}:${B}", {"A": "x"}) == "x:"


@pytest.mark.slow
def test_the_steps_of_the_cpu_image(tmp_path: Path) -> None:
    """Fails if a step of Dockerfile.cpu, or doctor, health check, training or report in it, breaks."""
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap")
    command = [sys.executable, str(ROOT / "packaging" / "try_cpu_image.py"), str(tmp_path / "root")]
    command += shlex.split(os.environ.get("MGGCN_TRY_IMAGE", ""))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "mggcn works here" in done.stdout
    assert "/tmp/run/report/index.html" in done.stdout


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
    arguments = {rest.partition("=")[0] for file in (GPU, CPU) for word, rest in instructions(file) if word == "ARG"}
    assert set(re.findall(r"--build-arg (\w+)=|^\| `([A-Z_]+)` \|", guides, re.MULTILINE)) <= {
        *((name, "") for name in arguments),
        *(("", name) for name in arguments),
    }
    named = set(re.findall(r"\b(?:tests|bench)/[\w/-]+(?:\.\w+)*", guides))
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
