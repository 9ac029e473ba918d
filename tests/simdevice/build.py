"""Compile the simulated device against the installed torch: about 45 s of CPU, once per version of torch and source."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "simdevice.cpp"


def device_type() -> str:
    """What torch calls the device: "cuda", or "npu" with ``SIMDEVICE=npu``: that of an extension such as torch_npu."""
    return "npu" if os.environ.get("SIMDEVICE") == "npu" else "cuda"


def library() -> Path:
    """Return where the compiled device is for the installed torch, whether or not it has been compiled. torch must not
    be imported to know that."""
    from importlib.metadata import version

    text = SOURCE.read_bytes() + version("torch").encode() + sys.version.encode()
    folder = Path(os.environ.get("SIMDEVICE_CACHE") or Path(tempfile.gettempdir()) / f"simdevice-{os.getuid()}")
    return folder / hashlib.blake2b(text, digest_size=8).hexdigest() / f"{device_type()}.so"


def build() -> Path:
    """Compile the device, unless that was done before. Must run where it is not loaded.

    Raises:
        RuntimeError: the compiler has failed; the message has its output.
    """
    target = library()
    if target.exists():
        return target
    import torch.utils.cpp_extension as cpp

    flags = ("-DSIMDEVICE_NPU",) if device_type() == "npu" else ()
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_suffix(f".{os.getpid()}")  # renamed below: another process may build it too
    torch_lib = Path(cpp.include_paths()[0]).parent / "lib"
    command = [
        *("g++", "-shared", "-fPIC", "-std=c++20", "-O1", "-g0", "-w", *flags),
        "-DTORCH_EXTENSION_NAME=simdevice",
        *(f"-I{folder}" for folder in (*cpp.include_paths(), sysconfig_include())),
        *(str(SOURCE), "-o", str(made)),
        *(f"-L{torch_lib}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-4000:]}")
    made.replace(target)
    return target


def sysconfig_include() -> str:
    """The folder of Python's headers."""
    import sysconfig

    return sysconfig.get_paths()["include"]


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
