"""ep/torch.hpp against every torch of the repository's environments: the example, and what users
get wrong.
"""

import concurrent.futures
import pathlib
import re
import shutil

import pytest

from install import building

TORCHES = building.torch_packages()
NEEDS_TORCH = pytest.mark.skipif(not TORCHES, reason="needs torch: requirements/dev.txt brings it")
SOURCES = {
    "moe_libtorch": building.ROOT / "examples" / "libtorch",
    "torch_faults": building.ROOT / "tests" / "install" / "torch_faults",
}


def version(folder: pathlib.Path) -> str:
    (text,) = re.findall(r"^__version__ = '([^'+]+)", (folder / "version.py").read_text(), re.M)
    return text


@pytest.fixture(scope="module")
def programs(
    package: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, pathlib.Path], concurrent.futures.Future[pathlib.Path]]:
    """Both programs for every torch, two compilers at a time: a unit with torch takes seconds."""
    base = tmp_path_factory.mktemp("libtorch")
    with concurrent.futures.ThreadPoolExecutor(2) as compilers:
        return {
            (name, torch): compilers.submit(
                building.build,
                source,
                base / f"{name}-{version(torch)}",
                ep_DIR=package,
                TORCH_FOLDER=torch,
            )
            for torch in TORCHES
            for name, source in SOURCES.items()
        }


@NEEDS_TORCH
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("torch", TORCHES, ids=version)
def test_the_example_equals_torch_in_one_rank(programs, torch, num_ranks):
    folder = programs["moe_libtorch", torch].result()
    said = building.command(folder / "moe_libtorch", num_ranks)
    assert said.count("forward equal") == num_ranks
    assert said.endswith("moe_libtorch: all equal to torch in one rank\n")


@NEEDS_TORCH
@pytest.mark.parametrize("torch", TORCHES, ids=version)
def test_what_users_of_at_tensor_get_wrong(programs, torch):
    folder = programs["torch_faults", torch].result()
    said = building.command(folder / "torch_faults", "--gtest_brief=1")
    assert re.search(r"^\[  PASSED  \] (\d+) tests", said, re.MULTILINE), said


@NEEDS_TORCH
def test_the_example_configures_with_torchs_own_package(package, tmp_path):
    """As its first lines say; a torch built with CUDA asks for the CUDA toolkit."""
    torch = TORCHES[0]
    has_toolkit = shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/include").is_dir()
    if (torch / "lib" / "libtorch_cuda.so").exists() and not has_toolkit:
        pytest.skip("this torch was built with CUDA: find_package(Torch) needs its toolkit")
    defines = {"ep_DIR": package, "CMAKE_PREFIX_PATH": torch / "share" / "cmake"}
    source = SOURCES["moe_libtorch"]
    building.command(*building.configure(source, tmp_path / "build", **defines))
