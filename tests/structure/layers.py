"""The include graph that the layers allow, and what a tree does against it.

Includes only ever point down.  They are written from the layer's root: "layout/record.hpp" below
csrc/, "ep/tensor.hpp" below include/.
"""

import pathlib
import re

# A file may include its own folder and these; "ep" stands for include/ep.
MAY_INCLUDE = {
    "ep": set(),
    "common": {"ep"},
    "layout": {"common"},
    "kernels": {"common", "layout"},
    "jit": {"ep", "common"},
    "device": {"ep", "common", "layout", "kernels", "jit"},
    "fabric": {"ep", "common", "layout", "device"},
    "buffer": {"ep", "common", "layout", "kernels", "jit", "device", "fabric"},
}
SUFFIXES = {".hpp", ".cuh", ".cpp", ".cu"}
QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
ANGLED = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>]+)>", re.MULTILINE)
# Engines build against include/ep with a C++ compiler alone.
FOREIGN_TO_PUBLIC = re.compile(r"^(cuda|nccl|nvrtc|Python\.h|pybind11|torch|ATen|c10)")
WITH_TORCH = {"torch.hpp"}


def violations(root: pathlib.Path) -> list[str]:
    """Returns every include below root's csrc/ and include/ that the layers do not allow."""
    found = []
    for source in sorted(_sources(root)):
        text = source.read_text(encoding="utf-8")
        name = source.relative_to(root).as_posix()
        layer = _layer_of(source, root)
        if layer not in MAY_INCLUDE:
            found.append(f"{name}: no layer is called '{layer}'")
            continue
        for target in QUOTED.findall(text):
            found += [f'{name}: "{target}" {why}' for why in _against(target, source, layer, root)]
        for target in ANGLED.findall(text):
            if target.split("/")[0] in MAY_INCLUDE:
                found.append(f"{name}: <{target}> is ours: write it in quotes")
            elif _is_foreign(target, layer, source):
                found.append(f"{name}: <{target}> has no place in a public header")
    return found


def _is_foreign(target: str, layer: str, source: pathlib.Path) -> bool:
    needs_nothing = layer == "ep" and source.name not in WITH_TORCH
    return needs_nothing and FOREIGN_TO_PUBLIC.match(target) is not None


def _sources(root: pathlib.Path) -> list[pathlib.Path]:
    files = [*(root / "csrc").rglob("*"), *(root / "include").rglob("*")]
    return [f for f in files if f.suffix in SUFFIXES]


def _layer_of(source: pathlib.Path, root: pathlib.Path) -> str:
    parts = source.relative_to(root).parts
    return parts[1] if len(parts) > 2 else ""


def _against(target: str, source: pathlib.Path, layer: str, root: pathlib.Path) -> list[str]:
    parts = pathlib.PurePosixPath(target).parts
    there = parts[0]
    why = []
    if there != layer and there not in MAY_INCLUDE[layer]:
        why.append(f"is not for {layer} to include")
    if layer == "buffer" and target.endswith(".cuh"):
        why.append("is a kernel's body: buffer sees configurations and parameters only")
    is_cuda_target = source.parent.parts[-2:] == ("device", "cuda")
    if parts[:2] == ("kernels", "ptx") and layer != "kernels" and not is_cuda_target:
        why.append("is a device leaf: only kernels and device/cuda include it")
    base = root / ("include" if there == "ep" else "csrc")
    if not (base / target).is_file():
        why.append(f"is not a file below {base.relative_to(root)}")
    return why
