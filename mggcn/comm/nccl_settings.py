"""The settings of NCCL that mggcn makes, and the sizes that determine NCCL's memory. Needs no torch.

NCCL reads its settings from the environment, once, when a process first calls it; a user may also write them into a file
(NCCL_CONF_FILE, else ~/.nccl.conf; then /etc/nccl.conf). What the user set stays: mggcn adds what is missing.

NCCL_ALGO=Ring, NCCL_NVLS_ENABLE=0: sums repeat bit for bit. In a ring the order of additions follows from the size of the
buffer, the topology and NCCL's version. The sums of NVLink's switches, which 8 H100s would use, differ from call to call
(NVIDIA/nccl#1497) and depend on what was allocated before (#2360). For less than 1 MB of gradients they would save about
30 microseconds an epoch.
NCCL_MAX_NCHANNELS=16: a channel of a Hopper carries up to 37 to 39 GB/s by NCCL's own model (src/graph/tuning.cc), NVLink
370 (NVIDIA/nccl-tests#212). More would hold buffers and multiprocessors and carry no more.
NCCL_MAX_P2P_NCHANNELS=8: sends and receives keep a buffer for each channel of each peer, 32 channels of 7 peers on
8 x H100 (#1685): 2.6 GiB; with 8 channels 0.7 GiB, at about 300 of the 370 GB/s and a quarter of the multiprocessors. The
rates are estimates that nobody has measured with mggcn; NCCL_MAX_P2P_NCHANNELS=16 buys the rest for 0.7 GiB more.
NCCL_BUFFSIZE stays NCCL's own 4 MiB: NVIDIA advises against another one (#285, #1739), and half of it would save a sixth.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mggcn.comm.nccl_memory import NcclMemory, NcclSizes

SETTINGS: Final = MappingProxyType(
    {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "16", "NCCL_MAX_P2P_NCHANNELS": "8"}
)
"""Variables that mggcn sets unless the user did."""
TORCH_SETTINGS: Final = MappingProxyType(
    {
        "TORCH_FR_BUFFER_SIZE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
    }
)
"""Settings of torch's own thread that watches NCCL: no trace of each call, which costs a look at the stack, no other rank
asked for one in the store, and 4 s rather than 60 between a failure and the end of the process."""
SAME: Final = MappingProxyType({"NCCL_MAX_NCHANNELS": ("NCCL_MAX_CTAS", "NCCL_MAX_NRINGS")})
"""Other names under which the user may have made a setting."""
LEAST: Final = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NRINGS")
SYSTEM_FILE: Final = Path("/etc/nccl.conf")

MAX_CHANNELS: Final = 64
BUFFERS: Final = MappingProxyType(
    {"NCCL_LL_BUFFSIZE": 8 * 512 * 8 * 16, "NCCL_LL128_BUFFSIZE": 120 * 640 * 8 * 8, "NCCL_BUFFSIZE": 2**22}
)
"""NCCL's own sizes of a connection's buffers, one for each protocol (src/init.cc, computeBuffSizes)."""
CHUNK_BYTES: Final = 2**19
"""NCCL's own chunks of sends, over NVLink; an eighth of NCCL_BUFFSIZE at most."""


def missing_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return mggcn's settings of NCCL that the user has not set, whether by name or by an equivalent name."""
    names = {name: (name, *SAME.get(name, ())) for name in SETTINGS}
    return {name: SETTINGS[name] for name in SETTINGS if not any(same in given for same in names[name])}


def user_settings(environ: Mapping[str, str], system: Path = SYSTEM_FILE) -> dict[str, str]:
    """Return the user's settings of NCCL: from the environment, then the user's file, then the system's."""
    named = environ.get("NCCL_CONF_FILE")
    own = Path(named) if named else Path(environ.get("HOME") or Path.home()) / ".nccl.conf"
    return _of_file(system) | _of_file(own) | {name: text for name, text in environ.items() if name.startswith("NCCL_")}


def make_settings(environ: MutableMapping[str, str]) -> None:
    """Add mggcn's settings to the environment of this process, before its first call of NCCL."""
    environ.update(missing_settings(user_settings(environ)))
    environ.update({name: text for name, text in TORCH_SETTINGS.items() if name not in environ})


def sizes_of(given: Mapping[str, str]) -> NcclSizes:
    """Return the sizes that determine NCCL's memory, under the user's settings and those that mggcn adds."""
    settings = missing_settings(given) | dict(given)
    most = [settings[name] for name in ("NCCL_MAX_NCHANNELS", *SAME["NCCL_MAX_NCHANNELS"]) if name in settings]
    ring = min([_number(text, MAX_CHANNELS) for text in most], default=MAX_CHANNELS)
    ring = min(max(ring, *(_number(settings.get(name), 1) for name in LEAST)), MAX_CHANNELS)
    p2p = min(ring, _number(settings.get("NCCL_MAX_P2P_NCHANNELS"), MAX_CHANNELS))
    p2p = min(max(p2p, _number(settings.get("NCCL_MIN_P2P_NCHANNELS"), 1)), MAX_CHANNELS)
    p2p = 1 << (p2p - 1).bit_length()  # NCCL maps peers to channels in powers of two
    buffers = {name: _number(settings.get(name), size) for name, size in BUFFERS.items()}
    chunk = _number(settings.get("NCCL_P2P_NVL_CHUNKSIZE"), CHUNK_BYTES)
    return NcclSizes.of(ring, p2p, [*buffers.values()], min(chunk, buffers["NCCL_BUFFSIZE"] // 8))


def _number(text: str | None, default: int) -> int:
    """Return a setting as NCCL reads it: a value that is not a positive number counts as unset."""
    try:
        found = int(text or "", 0)
    except ValueError:
        return default
    return found if found > 0 else default


def _of_file(path: Path) -> dict[str, str]:
    """Return the settings of one of NCCL's files, none if it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): text.strip() for name, found, text in pairs if found and name.strip()}


UNMEASURED: Final = NcclMemory(sizes_of({}))
"""NCCL's memory as a plan assumes it where the user set nothing and nothing was measured."""
