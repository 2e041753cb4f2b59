"""What a rank of a prediction from disk has finished, beside its page file: one that was killed goes on there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import final

from mggcn.comm.base import Communicator
from mggcn.comm.gather import gather_texts
from mggcn.files import read_json, write_bytes
from mggcn.graph.durable import sync_folder
from mggcn.memory.arena import ArenaPlan
from mggcn.train.pages import PageFile
from mggcn.train.staged import StagedProgram

NOTHING = -1
"""Not even features are in the page file."""


@final
class Partial:
    """The stages of an evaluation that all ranks have finished, with what they wrote on the disk.

    identity: of all that the page file depends on: weights, graph, plan. A folder with another one begins anew.
    """

    def __init__(self, folder: Path, identity: str, comm: Communicator) -> None:
        self.folder = folder
        self.pages_name: str = f"pages-{comm.rank}"
        self.stage: int = NOTHING
        """Stages that are finished; 0: features are written, and set-up has run."""
        self._path = folder / f"stages-{comm.rank}.json"
        self._identity, self._comm = identity, comm
        self._pages: PageFile | None = None

    @property
    def has_inputs(self) -> bool:
        """Whether features are in the page file, as set-up leaves them."""
        return self.stage != NOTHING

    def begin(self, pages: PageFile, evaluate: StagedProgram, resident: ArenaPlan) -> None:
        """Let an evaluation go on behind what was finished of the same prediction. Collective.

        pages: the rank's file. resident: what the evaluation has in memory from stage to stage; then all stages run again.
        """
        self._pages = pages
        found = gather_texts(self._comm, str(self._recorded() if pages.continues else NOTHING))
        stages = [int(text) for text in found]
        # A rank records a stage when all have it on the disk, so the most that any has recorded holds for all. Later stages
        # may write where earlier ones read, and are then the only ones that can run again.
        self.stage = NOTHING if NOTHING in stages else max(stages)
        if self.stage == NOTHING:
            self._path.unlink(missing_ok=True)
            sync_folder(self.folder)
        if not resident.placements:
            evaluate.first, evaluate.finished = max(self.stage, 0), self.finished

    def finished(self, stage: int) -> None:
        """Record that so many stages are finished. Collective. Cost: what is written reaches the disk. Raises: OSError."""
        if self._pages is not None:
            self._pages.sync()
        self._comm.barrier()
        write_bytes(self._path, json.dumps({"identity": self._identity, "stages": stage}).encode())
        self.stage = stage

    def _recorded(self) -> int:
        try:
            found = read_json(self._path)
        except (OSError, ValueError):
            return NOTHING
        same = isinstance(found, dict) and found.get("identity") == self._identity
        return int(found["stages"]) if same else NOTHING
