"""Wall clocks that can be stepped, one for each rank: see clock.c."""

import shutil
import struct
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc")


class Clocks:
    """The clocks of a job's processes.

    Attributes:
        env: what a process must have in its environment for its clock to be one of these.
    """

    def __init__(self, folder, ranks):
        """Build the library into a folder; all clocks are right at first.

        Args:
            folder: of their own, made here.
            ranks: how many.
        """
        folder.mkdir()
        library = folder / "clock.so"
        source = Path(__file__).parent / "clock.c"
        argv = [COMPILER or "cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"]
        subprocess.run(argv, check=True)
        self._files = [folder / str(rank) for rank in range(ranks)]
        self.env = {"LD_PRELOAD": str(library), "TEST_CLOCKS": str(folder)}
        for file in self._files:
            file.write_bytes(bytes(8))

    def set(self, seconds, rank=None):
        """Set the clock of one rank, or of all, ahead of the machine's by so much."""
        for file in self._files if rank is None else [self._files[rank]]:
            with file.open("r+b") as clock:  # as it is: the processes have mapped it
                clock.write(struct.pack("q", seconds))
