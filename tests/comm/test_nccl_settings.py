"""NCCL's settings as mggcn makes them, and the bytes that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from mggcn.comm.nccl_memory import MIB, NcclMeasured, NcclMemory, NcclSizes, memory_from_dict
from mggcn.comm.nccl_settings import SETTINGS, TORCH_SETTINGS, make_settings, missing_settings, sizes_of, user_settings

OWN = {"NCCL_MAX_NCHANNELS": "32", "NCCL_MAX_P2P_NCHANNELS": "32"}
"""As NCCL would choose on 8 x H100."""


def test_only_what_the_user_left_is_set() -> None:
    """Fails if a user's setting is changed, under its name or another, or a missing one is left to NCCL."""
    assert missing_settings({}) == dict(SETTINGS)
    assert missing_settings({"NCCL_ALGO": "allreduce:tree"}) == {k: v for k, v in SETTINGS.items() if k != "NCCL_ALGO"}
    assert "NCCL_MAX_NCHANNELS" not in missing_settings({"NCCL_MAX_CTAS": "4"})
    assert "NCCL_MAX_NCHANNELS" not in missing_settings({"NCCL_MAX_NRINGS": "4"})
    environ = {"HOME": "/nowhere", "NCCL_NVLS_ENABLE": "1", "PATH": "/bin"}
    make_settings(environ)
    assert environ == {**SETTINGS, **TORCH_SETTINGS, "HOME": "/nowhere", "NCCL_NVLS_ENABLE": "1", "PATH": "/bin"}


def test_settings_of_files_are_the_users(tmp_path: Path) -> None:
    """Fails if a setting in NCCL's files is overridden, or the environment does not go before the files."""
    system, own, named = tmp_path / "nccl.conf", tmp_path / ".nccl.conf", tmp_path / "named"
    system.write_text("NCCL_ALGO=Tree\nNCCL_DEBUG=WARN\n")
    own.write_text("# NCCL_NVLS_ENABLE=1\nNCCL_DEBUG = INFO\nno setting\n\n")
    named.write_text("NCCL_MAX_P2P_NCHANNELS=16\n")
    home = {"HOME": str(tmp_path)}
    assert user_settings(home, system) == {"NCCL_ALGO": "Tree", "NCCL_DEBUG": "INFO"}
    assert user_settings({**home, "NCCL_ALGO": "Ring"}, tmp_path / "absent")["NCCL_ALGO"] == "Ring"
    chosen = {**home, "NCCL_CONF_FILE": str(named)}
    assert user_settings(chosen, tmp_path) == {"NCCL_CONF_FILE": str(named), "NCCL_MAX_P2P_NCHANNELS": "16"}
    make_settings(chosen)
    assert "NCCL_MAX_P2P_NCHANNELS" not in chosen


def test_sizes_follow_from_the_settings() -> None:
    """Fails if the sizes are not those of NCCL's allocations, or another channel or buffer does not change them."""
    sizes = sizes_of({})
    assert (sizes.channels, sizes.p2p_channels) == (16, 8)
    # NVIDIA/nccl#1685 lists allocations of 10,485,760 and 2,097,152 bytes for each channel of each peer.
    assert sizes.connection_bytes == 10_485_760 + 2_097_152
    # NVIDIA/nccl#2363: 536,870,912 bytes at 64 channels.
    assert sizes_of({"NCCL_MAX_NCHANNELS": "64", "NCCL_MAX_P2P_NCHANNELS": "64"}).shared_bytes == 536_870_912
    assert sizes_of({"NCCL_BUFFSIZE": "1048576"}).connection_bytes == 10 * MIB
    assert sizes_of({"NCCL_BUFFSIZE": "1048576"}).shared_bytes == 16 * 8 * 2**17
    assert sizes_of({"NCCL_BUFFSIZE": "-2"}) == sizes_of({"NCCL_BUFFSIZE": "many"}) == sizes


@pytest.mark.parametrize(
    ("settings", "channels"),
    [
        ({"NCCL_MAX_CTAS": "4"}, (4, 4)),
        ({"NCCL_MAX_CTAS": "48", "NCCL_MAX_NRINGS": "12"}, (12, 8)),
        ({"NCCL_MIN_NCHANNELS": "20"}, (20, 8)),
        ({"NCCL_MIN_CTAS": "24"}, (24, 8)),
        ({"NCCL_MAX_P2P_NCHANNELS": "10"}, (16, 16)),
        ({"NCCL_MAX_P2P_NCHANNELS": "0x20"}, (16, 16)),
        ({"NCCL_MIN_P2P_NCHANNELS": "24"}, (16, 32)),
        ({"NCCL_MAX_NCHANNELS": "1000", "NCCL_MAX_P2P_NCHANNELS": "1000"}, (64, 64)),
    ],
)
def test_channels_are_those_that_nccl_will_take(settings: dict[str, str], channels: tuple[int, int]) -> None:
    """Fails if the estimate reads other channels than NCCL: least before most, powers of two for sends, 64 in all."""
    sizes = sizes_of(settings)
    assert (sizes.channels, sizes.p2p_channels) == channels


def test_bytes_by_ranks_and_kind_of_message() -> None:
    """Fails if one rank pays for peers, sends cost nothing, or NCCL's own channels cost less than users measured."""
    sizes = sizes_of({})
    found = {(ranks, p2p): sizes.nbytes(ranks, p2p) / MIB for ranks in (1, 2, 8, 9) for p2p in (False, True)}
    assert found[1, False] == found[1, True] == 256 + 64
    assert (found[2, False], found[2, True]) == (512, 512 + 8 * 12)
    assert (found[8, False], found[8, True]) == (704, 704 + 7 * 8 * 12)
    assert (found[9, False], found[9, True]) == (found[8, False], found[8, True])
    # NVIDIA/nccl#1685: 3.28 GB more after the first all-to-all of 8 x H100, 4.34 GB in all with the CUDA context.
    own = sizes_of(OWN)
    assert 3.28e9 < own.nbytes(8, True) < 4.34e9


def test_what_was_measured_goes_before_the_estimate() -> None:
    """Fails if a measurement is ignored, taken for more ranks or other settings, or lost on its way through a plan."""
    sizes, other = sizes_of({}), sizes_of(OWN)
    measured = (NcclMeasured(8, sizes, 500, 90), NcclMeasured(2, sizes, 300, 20), NcclMeasured(64, other, 7, 7))
    memory = NcclMemory(sizes, measured)
    assert [memory.nbytes(2, p2p) for p2p in (False, True)] == [300, 320]
    assert [memory.nbytes(5, p2p) for p2p in (False, True)] == [500, 590]
    assert memory.found(9) is None
    assert memory.nbytes(9, True) == sizes.nbytes(9, True)
    assert NcclMemory(NcclSizes.of(3, 1, [1], 1), measured).found(1) is None
    assert memory_from_dict(memory.to_dict()) == memory
