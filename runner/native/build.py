"""Compiles the kernels for this very CPU, once, and keeps what comes of it among the user's caches."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from runner.machine import cache_folder

FOLDER = Path(__file__).parent
SOURCES = ("linear.c", "mlp.c", "qkv.c", "attention.c", "norm.c", "decoder.c")
SPAN = 64
"""Tokens that the attention kernel takes at a time."""
MOST_HEAD_SIZE = 256
"""Elements of a head that it has room for."""
FLAGS = (
    f"-DSPAN={SPAN}",
    f"-DMOST_HEAD_SIZE={MOST_HEAD_SIZE}",
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
)
X86_FLAGS = ("-mprefer-vector-width=512",)
TIMEOUT = 120
"""Seconds that the compiler may take for a file. It takes about one."""


class NativeUnavailableError(RuntimeError):
    """The kernels cannot be had here; says why."""


def compiled_kernels(*, folder: Path | None = None) -> Path:
    """The shared library, compiled unless that was done before: about two seconds.

    Any number of processes may do so at once: each works in a folder of its own, and what it has made gets its name
    when it is whole. In the name is a digest of what it names: a library that a crash has cut short is made anew.

    Args:
        folder: Where it is kept; None: ``native`` in :func:`~runner.machine.cache_folder`.

    Raises:
        NativeUnavailableError: No compiler, one that fails, no OpenMP, or nowhere to keep what it makes; says what.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        raise NativeUnavailableError(f"CC={os.environ['CC']!r} is no command ({error})") from error
    flags = [*FLAGS, *(X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ())]
    openmp = _openmp_of_torch()
    fingerprint = _fingerprint([*compiler, *flags, openmp])
    try:
        folder = folder or cache_folder() / "native"
        for path in folder.glob(f"kernels-{fingerprint}-*.so"):
            if path.name == _name(fingerprint, path.read_bytes()):
                return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as work:
            made = _compile(compiler, flags, openmp, Path(work))
            return made.rename(folder / _name(fingerprint, made.read_bytes()))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        if isinstance(error, NativeUnavailableError):
            raise
        raise NativeUnavailableError(
            f"there is no folder to keep them in ({error}): name another in the environment variable XDG_CACHE_HOME"
        ) from error


def _compile(compiler: Sequence[str], flags: Sequence[str], openmp: str, work: Path) -> Path:
    """The library, somewhere in ``work``."""
    objects = []
    for name in SOURCES:
        objects.append(str(work / f"{name}.o"))
        _run([*compiler, *flags, "-c", str(FOLDER / name), "-o", objects[-1]])
    # Without -fopenmp, which would bring another OpenMP along.
    library = work / "kernels.so"
    _run([*compiler, "-shared", *objects, openmp, "-lm", "-o", str(library)])
    if not library.is_file():
        raise NativeUnavailableError(f"{compiler[0]} says that it has compiled them, and has not")
    return library


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except FileNotFoundError as error:
        raise NativeUnavailableError(
            f"there is no C compiler {command[0]}: install one, or name another in the environment variable CC"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"{command[0]} takes more than {TIMEOUT} s") from error
    except OSError as error:
        raise NativeUnavailableError(f"{command[0]} cannot be run ({error.strerror})") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        complaint = next((line for line in lines if "error" in line), lines[0])
        raise NativeUnavailableError(f"{command[0]} cannot compile them ({complaint})")


def _openmp_of_torch() -> str:
    """The OpenMP library that torch computes with. Threads of another would fight with its threads for the cores."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError as error:
        raise NativeUnavailableError("they are for Linux") from error
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in mapped.splitlines() if line.count("/"))
    found = [path for path in paths if re.match(r"lib[gi]?omp\d*(-[0-9a-f]+)?\.so", Path(path).name)]
    if not found:
        raise NativeUnavailableError("torch has loaded no OpenMP library")
    # Other packages may have brought their own. torch's is in its folder, or beside that in torch.libs.
    home = str(Path(torch.__file__).parent)
    return next((path for path in found if path.startswith((f"{home}/", f"{home}.libs/"))), found[0])


def _fingerprint(command: Sequence[str]) -> str:
    """Of the command, the sources and what the CPU can do: a home folder may serve machines with other CPUs.

    Not of the compiler's version, which would have to be asked for in every process.
    """
    digest = hashlib.sha256(repr((command, platform.machine(), _cpu_flags())).encode())
    for path in sorted(FOLDER.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _name(fingerprint: str, library: bytes) -> str:
    return f"kernels-{fingerprint}-{hashlib.sha256(library).hexdigest()[:12]}.so"


def _cpu_flags() -> str:
    """The line of Linux' list that says what the CPU can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
