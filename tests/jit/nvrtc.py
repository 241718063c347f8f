"""NVRTC through ctypes: no CUDA toolkit, no header and no compiler needed.

Run as a program it compiles jobs: JSON {name: {"source", "options"}} in, {name: result} out.  A
process of its own because NVRTC serialises the threads of one.
"""

import concurrent.futures
import ctypes
import importlib.util
import json
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = [
    "-arch=sm_90a",
    "-std=c++20",
    "--fmad=false",
    "--ptxas-options=-v",
    f"-I{ROOT / 'csrc'}",
]


def find_library() -> pathlib.Path | None:
    """The libnvrtc of the wheel that torch brings; None: there is none."""
    nvidia = importlib.util.find_spec("nvidia")
    places = nvidia.submodule_search_locations if nvidia else None
    for place in places or []:
        for folder in ("cu13/lib", "cuda_nvrtc/lib"):
            for file in sorted(pathlib.Path(place, folder).glob("libnvrtc.so.*")):
                return file
    return None


class Nvrtc:
    def __init__(self, library: pathlib.Path):
        self._lib = ctypes.CDLL(str(library))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: str, options: list[str]) -> dict:
        """Returns {"error": text or "", "log", "ptx", "seconds"}."""
        program = ctypes.c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"unit.cu", 0, None, None
            )
        )
        try:
            arguments = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
            start = time.monotonic()
            code = self._lib.nvrtcCompileProgram(program, len(options), arguments)
            seconds = time.monotonic() - start
            return {
                "error": self._lib.nvrtcGetErrorString(code).decode() if code else "",
                "log": self._text("ProgramLog", program),
                "ptx": "" if code else self._text("PTX", program),
                "seconds": seconds,
            }
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, text))
        return text.value.decode()

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(self._lib.nvrtcGetErrorString(code).decode())


def compile_all(library: pathlib.Path, jobs: dict, num_processes: int = 2) -> dict:
    """Compiles {name: {"source", "options"}}, in processes side by side."""
    names = list(jobs)
    shares = [{n: jobs[n] for n in names[i::num_processes]} for i in range(num_processes)]

    def run(share: dict) -> dict:
        command = [sys.executable, __file__, str(library)]
        done = subprocess.run(
            command, input=json.dumps(share), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"the compiling process ended with {done.returncode}: {done.stderr}")
        return json.loads(done.stdout)

    with concurrent.futures.ThreadPoolExecutor(num_processes) as pool:
        return {n: r for part in pool.map(run, [s for s in shares if s]) for n, r in part.items()}


def main() -> None:
    nvrtc = Nvrtc(pathlib.Path(sys.argv[1]))
    jobs = json.load(sys.stdin)
    json.dump({n: nvrtc.compile(j["source"], j["options"]) for n, j in jobs.items()}, sys.stdout)


if __name__ == "__main__":
    main()
