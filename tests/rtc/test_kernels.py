"""Every kernel compiles for sm_90a as the library will compile it: no warning, no spill."""

import re

import pytest

from rtc import nvrtc, units

UNITS = {unit.name: unit for unit in units.kernels() + units.leaves()}


@pytest.fixture(scope="module")
def compiled(request, nvrtc_library) -> dict:
    """Results of the units that this run asks for, compiled side by side."""
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    jobs = {
        name: {"source": unit.source, "options": nvrtc.OPTIONS}
        for name, unit in UNITS.items()
        if name in wanted
    }
    return nvrtc.compile_all(nvrtc_library, jobs)


@pytest.mark.parametrize("name", UNITS)
def test_compiles_without_warning_or_spill(name, compiled, record_property):
    result = compiled[name]
    assert not result["error"], result["log"]
    assert "warning" not in result["log"], result["log"]

    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", result["log"])
    assert spills and set(spills) == {"0"}, result["log"]
    assert _registers(result) <= UNITS[name].max_registers
    record_property("registers", _registers(result))
    record_property("seconds", round(result["seconds"], 2))


@pytest.mark.parametrize("name", UNITS)
def test_peer_memory_never_goes_through_the_read_only_cache(name, compiled):
    """An acquire does not invalidate what ld.global.nc has cached."""
    assert re.search(r"\bld\.\w*", compiled[name]["ptx"])
    assert not re.search(r"\bld\.[\w.:]*\bnc\b", compiled[name]["ptx"])


@pytest.mark.parametrize("name", ["copy_out"])
def test_rows_move_in_16_byte_accesses(name, compiled):
    ptx = compiled[name]["ptx"]
    for access in ("ld", "st"):
        assert re.search(rf"\b{access}\.(?:global\.)?(?:v2\.[ub]64|v4\.[ub]32)\b", ptx)


@pytest.mark.parametrize("name", ["copy_out"])
def test_report(name, compiled, capsys):
    """Registers, stack and compile time of what this run has compiled."""
    with capsys.disabled():
        print()
        for unit, result in compiled.items():
            stack = re.search(r"(\d+) bytes stack frame", result["log"])
            if not result["error"]:
                print(
                    f"  {unit:40} {_registers(result):4} registers of "
                    f"{UNITS[unit].max_registers:3}, {stack[1]:>4} bytes of stack, "
                    f"{result['seconds']:5.2f} s"
                )


def _registers(result: dict) -> int:
    return int(re.search(r"Used (\d+) registers", result["log"])[1])
