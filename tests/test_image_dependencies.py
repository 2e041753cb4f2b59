"""What pip would install into an image for GPUs: the steps of Dockerfile, resolved for CPython 3.12 without installing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from mggcn.backend.cuda.triton_kernels import TRIED
from tests.test_shipping import PROJECT, ROOT, runs, stages

TORCH = {12: "torch<2.11", 13: "torch"}
"""pip's default builds: for CUDA 12 until 2.10, for CUDA 13 since. Another index is named by whoever builds an image."""
BUILT = ("pymetis",)
"""Packages that the image's first stage builds where they have no wheel."""
PROBE = "numpy"
"""A package that every registry has for the image: where pip finds none of its versions either, no registry answers. pip
says "from versions: none" of a package without a wheel for the image, too, and of a wrong name."""
GLIBC = 39
"""Minor version of the C library of the image, Ubuntu 24.04."""

Installed = dict[str, list[str]]
"""Versions by normalised name."""


def pip(folder: Path, *packages: str) -> subprocess.CompletedProcess[str]:
    """Let pip say in report.json what it would install for the image; constraints are in held.txt."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC + 1)]
    tags += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
    command += ["--target", str(folder / "nothing"), "--report", str(folder / "report.json")]
    command += ["--constraint", str(folder / "held.txt")]
    command += ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp"]
    command += [f"--abi={abi}" for abi in ("cp312", "abi3", "none")] + [f"--platform={tag}" for tag in tags]
    return subprocess.run([*command, *packages], capture_output=True, text=True, check=False, timeout=500)


def resolve(folder: Path, *packages: str, held: Installed | None = None) -> Installed:
    """Return what pip would install for these packages. Skips where no registry answers."""
    constraints = folder / "held.txt"
    constraints.write_text("\n".join(f"{name}=={one}" for name, versions in (held or {}).items() for one in versions))
    done = pip(folder, *packages)
    if done.returncode:
        constraints.write_text("")
        if pip(folder, PROBE).returncode:
            pytest.skip("pip reaches no registry here")
        pytest.fail(done.stderr[-2000:])
    found: Installed = {}
    for one in json.loads((folder / "report.json").read_text())["install"]:
        name = re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower()
        found.setdefault(name, []).append(one["metadata"]["version"])
    return found


def faults(installed: Installed, cuda: int) -> list[str]:
    """Return what is not one torch, one NCCL, CuPy and libraries of one CUDA, and a Triton that the kernels know."""

    def only(kind: str, wanted: str) -> list[str]:
        names = [name for name, versions in installed.items() if re.match(kind, name) for _ in versions]
        return [] if names == [wanted] else [f"{names} in the place of one {wanted}"]

    runtime = "nvidia-cuda-runtime-cu12" if cuda == 12 else "nvidia-cuda-runtime"
    found = only("torch$", "torch") + only("nvidia-nccl", f"nvidia-nccl-cu{cuda}") + only("cupy", f"cupy-cuda{cuda}x")
    found += only("nvidia-cuda-runtime", runtime)
    other = 25 - cuda
    found += [f"{name} for CUDA {other}" for name in installed if re.search(rf"(cu|cuda){other}x?$", name)]
    majors = {version.split(".")[0] for version in installed.get(runtime, [])}
    found += [] if majors == {str(cuda)} else [f"{runtime} {majors}"]
    tried = [version for version in installed.get("triton", []) if version.startswith(TRIED)]
    return found + ([] if len(tried) == 1 else [f"triton {installed.get('triton')}, tried {TRIED}"])


def packages_of_image(cuda: int) -> list[str]:
    """The packages of the Dockerfile's second installation, for a version of CUDA."""
    command = next(run for run in runs(stages()[-1]) if "cupy-cuda" in run)
    (extras,) = re.findall(r'mggcn-\*\.whl\)\[([\w,]+)\]"', command)
    (cupy,) = re.findall(r'"cupy-cuda([^"]+)"', command)
    assert cupy == "${CUDA_VERSION%%.*}x"
    found = [*PROJECT["dependencies"], f"cupy-cuda{cuda}x"]
    for extra in extras.split(","):
        found += PROJECT["optional-dependencies"][extra]
    return [package for package in found if not package.startswith(BUILT)]


@pytest.mark.slow
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("cuda", list(TORCH))
def test_an_image_has_one_torch_one_nccl_and_one_cuda(cuda: int, tmp_path: Path) -> None:
    """Fails if packages do not resolve, bring another torch, NCCL or CUDA than the image's, or a Triton nobody tried."""
    torch = resolve(tmp_path, TORCH[cuda])
    installed = resolve(tmp_path, "torch", *packages_of_image(cuda), held=torch)
    assert {name: installed.get(name) for name in torch} == torch, (
        "the second installation changes what the first brought"
    )
    assert faults(installed, cuda) == []


def wheel(folder: Path, name: str, tag: str) -> None:
    """Write a package that holds nothing."""
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as file:
        info = f"{name}-1.0.dist-info"
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("package", "answers", "expected"),
    [
        ("cupy-cuda12x", "yes", "resolved"),
        ("no-wheel-for-312", "yes", "failed"),
        ("cupy-cuda12", "yes", "failed"),
        ("cupy-cuda12x", "empty", "skipped"),
        ("cupy-cuda12x", "refused", "skipped"),
    ],
    ids=["fine", "no wheel", "wrong name", "empty registry", "no registry"],
)
def test_only_a_registry_that_answers_nothing_skips(
    package: str, answers: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a package without a wheel for the image, or of a wrong name, counts as a registry that does not answer."""
    registry = tmp_path / "registry"
    registry.mkdir()
    if answers == "yes":
        wheel(registry, PROBE, "cp312-cp312-manylinux_2_28_x86_64")
        wheel(registry, "cupy_cuda12x", "cp312-cp312-manylinux_2_28_x86_64")
        wheel(registry, "no_wheel_for_312", "cp311-cp311-manylinux_2_28_x86_64")
    if answers == "refused":
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens at that port
        monkeypatch.setenv("PIP_RETRIES", "0")
    else:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    found, said = "resolved", ""
    try:
        resolve(tmp_path, package)
    except pytest.skip.Exception:  # not to skip this test, too
        found = "skipped"
    except pytest.fail.Exception as error:
        found, said = "failed", str(error)
    assert found == expected
    assert ("from versions: none" in said) == (expected == "failed")


FINE: Installed = {
    "torch": ["2.14.1"],
    "nvidia-nccl-cu13": ["2.30.7"],
    "cupy-cuda13x": ["14.2.0"],
    "nvidia-cuda-runtime": ["13.0.96"],
    "triton": [TRIED[0] + "0"],
}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"torch": ["2.14.1", "2.10.0"]}, "one torch"),
        ({"nvidia-nccl-cu12": ["2.27.5"]}, "one nvidia-nccl-cu13"),
        ({"nvidia-nccl-cu13": []}, "one nvidia-nccl-cu13"),
        ({"cupy-cuda13x": [], "cupy-cuda12x": ["13.6.0"]}, "one cupy-cuda13x"),
        ({"nvidia-cuda-runtime": ["12.8.90"]}, "{'12'}"),
        ({"nvidia-cudnn-cu12": ["9.10.2"]}, "nvidia-cudnn-cu12 for CUDA 12"),
        ({"triton": ["2.0.0"]}, "triton"),
    ],
)
def test_planted_packages_are_seen(fault: Installed, said: str) -> None:
    """Fails if the check passes a second torch or NCCL, another CUDA, or a Triton that was not tried."""
    assert faults(FINE, 13) == []
    assert any(said in found for found in faults(FINE | fault, 13))


def test_the_extras_of_the_image_are_those_that_are_resolved() -> None:
    """Fails if the Dockerfile's second installation is read as less than it installs."""
    packages = packages_of_image(12)
    assert "cupy-cuda12x" in packages
    assert {re.split(r"[>=<]", package)[0] for package in packages} >= {"numpy", "torch", "matplotlib", "ogb", "optuna"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["metis"][0].startswith(BUILT)
