"""A virtual environment for each peer, created on first use under ``benchmarks/.venvs`` (not in git).

torch is installed first, at the version in constraints.txt, so that a peer's own torch requirement cannot pull in
gigabytes of CUDA. constraints.txt pins everything except the peers themselves.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.roster import Contender

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE.parent / "constraints.txt"

logger = logging.getLogger(__name__)


def python_for(contender: Contender) -> str:
    """Return a contender's interpreter. Creates its environment if needed.

    Raises:
        RuntimeError: the installation failed.
    """
    if contender.venv is None:
        return sys.executable
    folder = HERE / ".venvs" / contender.venv
    python = folder / "bin" / "python"
    stamp = folder / "complete"
    wanted = _fingerprint(contender)
    if stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    logger.info("creating an environment for %s", contender.title)
    venv.create(folder, with_pip=True, clear=True)
    _pip(python, "torch")
    _pip(python, *contender.requirements)
    if contender.alone:
        _pip(python, "--no-deps", *contender.alone)
    stamp.write_text(wanted)
    return str(python)


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"pip install {' '.join(arguments)} failed: {done.stderr.strip()[-2000:]}")


def _fingerprint(contender: Contender) -> str:
    parts = [CONSTRAINTS.read_text(), sys.version, *contender.requirements, *contender.alone]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
