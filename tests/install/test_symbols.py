"""What the library brings into a process: no state that is shared, no names that meet others."""

import pathlib
import re

import pytest

import ep
from install import building

# Data that changes after the program has started, and why that harms nobody.
WRITABLE = {
    # Which instructions the CPU has: found at the first call, the same for everybody.
    "ep::kernels::host::(anonymous namespace)::tables()::kTables",
    # Buffers that were abandoned at exit, so that leak checkers see that it is meant; never read.
    "ep::BufferImpl::keep_for_ever(ep::Stream const&)::all",
}
# Calls that read or change what belongs to the whole process.
FOREIGN_STATE = re.compile(
    r"""^(_*(secure_)?getenv|setenv|putenv|unsetenv|environ|setlocale|uselocale|signal|sigaction
    |sigprocmask|atexit|at_quick_exit|on_exit|__cxa_atexit|__cxa_thread_atexit(_impl)?|pthread_atfork
    |__register_atfork|exit|_exit|abort|s?rand|srandom|chdir|umask|prctl|setrlimit|fork|system|popen
    |dlopen|puts|printf|fprintf|_ZSt4cout|_ZSt4cerr|_ZNSt8ios_base4InitC1Ev|openlog|syslog)$""",
    re.VERBOSE,
)


@pytest.fixture(scope="module")
def archive(prefix: pathlib.Path) -> pathlib.Path:
    (found,) = prefix.glob("lib*/**/libep.a")
    return found


def plain(name: str) -> str:
    """Without the inline namespace of the version."""
    return re.sub(r"\bep::v\d+_\d+::", "ep::", name)


def test_the_library_has_no_writable_data_but_what_is_listed(archive):
    """Constants with addresses lie in .data.rel.ro, which is read-only once loaded."""
    entry = re.compile(
        r"[0-9a-f]{16} (.{7}) (?:\.t?(?:data|bss)(?!\.rel\.ro)\S*|\*COM\*)\t[0-9a-f]+ +(.+)$"
    )
    found = set()
    for line in building.command("objdump", "-t", "-C", archive).splitlines():
        match = entry.match(line)
        if match is None or "d" in match[1] or match[2].startswith(".hidden DW.ref."):
            continue  # "d": the section itself
        found.add(plain(match[2].removeprefix(".hidden ").removeprefix("guard variable for ")))
    assert found == WRITABLE


def test_the_library_calls_nothing_that_belongs_to_the_whole_process(archive):
    said = building.command("nm", "-u", archive)
    units = re.findall(r"^(\S+\.o):\n((?: +U \S+\n)*)", said, re.MULTILINE)
    called = {(unit, name) for unit, names in units for name in names.split() if name != "U"}
    assert len(called) > 100
    found = {(unit, name) for unit, name in called if FOREIGN_STATE.match(name)}
    assert found <= {("nvrtc.cpp.o", "dlopen")}  # the compiler's library, where it is asked for


def test_no_object_runs_code_when_the_program_starts(archive):
    said = building.command("objdump", "-h", archive)
    assert not re.findall(r"\.(?:init_array|ctors|fini_array|dtors)\S*", said)


def test_every_name_of_the_library_is_hidden(archive):
    """So that two engines in one process never meet, whatever they export of their own."""
    said = building.command("readelf", "--wide", "--symbols", "--demangle", archive)
    entry = re.compile(r"^ +\d+: \S+ +\d+ (?:FUNC|OBJECT|TLS) +GLOBAL +(\S+) +\d+ (.+)$", re.M)
    named = entry.findall(said)
    assert len(named) > 200
    assert [name for visibility, name in named if visibility != "HIDDEN"] == []


def test_the_extension_exports_its_entry_and_nothing_else():
    said = building.command("nm", "--dynamic", "--defined-only", ep._C.__file__)
    exported = [line.split()[-1] for line in said.splitlines() if " W " not in line]
    assert exported == ["PyInit__C"]


def test_units_for_newer_cpus_share_no_function(archive):
    """An inline function of theirs could be the copy that the linker keeps for everybody."""
    said = building.command("nm", "--defined-only", "-C", archive)
    units = [unit.strip() for unit in re.split(r"\n(?=\S+\.o:\n)", said)]
    vector = [unit for unit in units if unit.startswith("simd_")]
    assert len(vector) >= 1
    assert re.findall(r"^.* [WVu] .*$", "\n".join(vector), re.MULTILINE) == []
