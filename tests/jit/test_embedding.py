"""The headers that the library carries for NVRTC: complete, and identified by one hash."""

import pathlib
import re
import subprocess

import pytest

from structure import layers

ROOT = pathlib.Path(__file__).parents[2]
# What csrc/device/cuda/kernel_source.cpp writes into a unit.
ENTRIES = {
    "device/cuda/warp.cuh",
    "kernels/dispatch.cuh",
    "kernels/combine.cuh",
    "kernels/turns.cuh",
}
FOR_CPUS = re.compile(r"^#if !EP_CUDA_COMPILE\n.*?^#(?:else|endif)", re.MULTILINE | re.DOTALL)


def included(entries: set[str]) -> set[str]:
    """Returns the headers that NVRTC reads when it reads these."""
    seen, left = set(), set(entries)
    while left:
        header = left.pop()
        seen.add(header)
        text = FOR_CPUS.sub("", (ROOT / "csrc" / header).read_text(encoding="utf-8"))
        left |= set(layers.QUOTED.findall(text)) - seen
    return seen


def test_the_bundle_has_what_kernels_include_and_nothing_else():
    text = (ROOT / "csrc/CMakeLists.txt").read_text(encoding="utf-8")
    listed = re.search(r"ep_embed_headers\((.*?)\)", text, re.DOTALL)[1].split()[2:]
    assert listed == sorted(included(ENTRIES))


def test_every_unit_begins_with_one_of_the_entries():
    source = (ROOT / "csrc/device/cuda/kernel_source.cpp").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+\.cuh", source))
    assert named == {pathlib.PurePosixPath(entry).name for entry in ENTRIES}


@pytest.fixture
def bundle(tmp_path):
    """Embeds two headers; returns the hash of what came out."""
    root = tmp_path / "csrc"
    (root / "deep").mkdir(parents=True)
    (root / "a.hpp").write_text('#pragma once  // ";" ${b} \\n [x] )"\n', encoding="utf-8")
    (root / "deep/b.hpp").write_text("int b;\n", encoding="utf-8")

    def embed(headers: str = "a.hpp,deep/b.hpp") -> str:
        output = tmp_path / "out.cpp"
        command = ["cmake", f"-DROOT={root}", f"-DHEADERS={headers}", f"-DOUTPUT={output}", "-P"]
        command.append(str(ROOT / "cmake/EpEmbed.cmake"))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        embed.text = output.read_text(encoding="utf-8")
        return re.search(r'"([0-9a-f]{64})"', embed.text)[1]

    embed.root = root
    return embed


def test_text_is_kept_to_the_letter(bundle):
    bundle()
    for header in ("a.hpp", "deep/b.hpp"):
        text = (bundle.root / header).read_text(encoding="utf-8")
        assert f'{{"{header}", R"ep_text({text})ep_text"}}' in bundle.text


def test_the_hash_changes_with_a_text_and_with_a_name(bundle):
    before = bundle()
    assert bundle() == before
    (bundle.root / "deep/b.hpp").write_text("int c;\n", encoding="utf-8")
    changed = bundle()
    assert changed != before
    (bundle.root / "deep/b.hpp").rename(bundle.root / "deep/c.hpp")
    assert bundle("a.hpp,deep/c.hpp") not in (before, changed)


def test_a_missing_header_ends_the_build(bundle):
    with pytest.raises(RuntimeError, match="absent"):
        bundle("a.hpp,absent.hpp")
