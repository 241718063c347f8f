"""`python -m ep`: help, doctor, cmake-dir and jit; test_bench.py has bench."""

import json
import re

import pytest

import ep
from ep.cli import cmake_dir, doctor, machine, main, self_test
from python.cli_process import hide, run_cli

STATES = {"ok", "missing", "note"}


def test_without_a_command_it_prints_help():
    done = run_cli()
    assert done.returncode == 0 and done.stderr == ""
    assert all(name in done.stdout for name in ("usage:", "doctor", "bench", "cmake-dir", "jit"))


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["bench", "--help"]])
def test_help_names_the_program_as_it_was_called(arguments):
    done = run_cli(*arguments)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m ep")


@pytest.mark.parametrize("arguments", [["docter"], ["doctor", "--jsn"], ["bench", "--rank"]])
def test_a_misspelt_command_or_option_is_bad_usage(arguments):
    done = run_cli(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert "error:" in done.stderr and "Traceback" not in done.stderr


def test_jit_is_unsupported_in_one_line():
    done = run_cli("jit")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("python -m ep jit: Unsupported: ")
    assert "GPU" in done.stderr and done.stderr.count("\n") == 1


def test_cmake_dir_prints_the_folder_of_the_package_and_nothing_else(tmp_path, monkeypatch, capsys):
    """tests/install builds programs with it."""
    package = tmp_path / "ep"
    folder = package / "lib" / "cmake" / "ep"
    folder.mkdir(parents=True)
    monkeypatch.setattr(cmake_dir.ep, "__file__", str(package / "__init__.py"))
    assert main(["cmake-dir"]) == 1  # run from its sources: there is no library to find
    error = capsys.readouterr().err
    assert str(folder) in error and "pip install" in error and error.count("\n") == 1
    (folder / "ep-config.cmake").touch()
    assert main(["cmake-dir"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_the_help_imports_neither_torch_nor_numpy(tmp_path):
    done = run_cli("bench", "--help", first_on_path=[hide(tmp_path, "torch", "numpy")])
    assert done.returncode == 0


def test_doctor_finds_all_it_needs_here():
    done = run_cli("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "all that ep needs is here"
    found = dict(re.match(r"(?:ok|note) +([^:]+): (.+)$", line).groups() for line in lines[:-1])
    assert ep.__version__ in found["package"]
    assert "DLPack" in found["torch"]
    assert "AVX" in found["cores"] or "portable" in found["cores"]
    assert found["GPU path"].startswith("not in this version")
    for how in ("threads", "processes"):
        assert "exact" in found[f"2 ranks as {how}"]


def test_doctor_writes_the_same_as_json():
    done = run_cli("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"] is True and report["do"] is None
    names = [check["name"] for check in report["checks"]]
    assert names[:2] == ["package", "python"] and names[-1] == "2 ranks as processes"
    assert len(set(names)) == len(names)
    for check in report["checks"]:
        assert check["state"] in STATES - {"missing"} and check["text"] and check["do"] == ""


def test_doctor_works_without_torch(tmp_path):
    done = run_cli("doctor", first_on_path=[hide(tmp_path, "torch")])
    assert done.returncode == 0, done.stdout
    assert re.search(r"^note +torch: No module named 'torch'", done.stdout, re.MULTILINE)
    assert re.search(r"^ok +2 ranks as processes: .*exact", done.stdout, re.MULTILINE)


def test_doctor_without_numpy_names_it_and_fails(tmp_path):
    done = run_cli("doctor", first_on_path=[hide(tmp_path, "torch", "numpy")])
    assert done.returncode == 1
    assert re.search(r"^missing +numpy: ", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "to do: pip install numpy"


def test_doctor_with_too_few_open_files_names_the_limit_and_fails():
    done = run_cli("doctor", "--json", open_files=24)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["ok"] is False
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert states["open files"] == "missing" and states["memfd"] == "ok"
    assert report["do"].startswith("ulimit -n 1024") and "24" in report["do"]


@pytest.mark.parametrize(
    ("release", "state"),
    [("5.3.18-generic", "missing"), ("5.4.0", "ok"), ("4.19", "missing"), ("6.1.0-rc1", "ok")],
)
def test_doctor_wants_a_kernel_with_sealed_memfds(release, state, monkeypatch):
    monkeypatch.setattr(machine.platform, "release", lambda: release)
    assert machine.kernel_answer()[0] == state


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("avx2 f16c avx512f avx512bw avx512vl avx512dq", "AVX-512"),
        ("avx2 f16c avx512f", "AVX2"),
        ("avx2", "portable"),
        ("", "portable"),
    ],
)
def test_doctor_names_the_kernels_that_the_cpu_gets(flags, text, monkeypatch):
    monkeypatch.setattr(machine, "cpu_field", {"flags": flags, "model name": "Some CPU"}.get)
    state, shown = machine.cores_answer()
    assert state == "ok" and text in shown and shown.endswith("Some CPU")


def test_a_check_that_raises_is_missing_and_the_next_ones_still_run(monkeypatch, capsys):
    def broken():
        raise OSError(38, "Function not implemented")

    looks = (("memfd", broken), ("python", doctor._python))
    monkeypatch.setattr(doctor, "_LOOKS", looks)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("missing memfd: OSError") and out[1].startswith("ok      python")
    assert out[2].startswith('to do: see why "memfd" fails')


def test_the_exchange_finds_a_wrong_value(monkeypatch):
    """Experts that answer with something else than the comparison expects."""
    real = self_test._expected_rows

    def swapped(routing, local_experts):
        expert, source, token = real(routing, local_experts)
        return expert, source, token[::-1]

    monkeypatch.setattr(self_test, "_expected_rows", swapped)
    with pytest.raises(ep.Error, match=r"source: \d+ values differ, the first at \["):
        self_test.exchange("threads")


def test_an_error_is_one_line_without_a_traceback(tmp_path):
    done = run_cli("bench", "--json", str(tmp_path / "no" / "out.json"))
    assert done.returncode == 1
    assert done.stderr.startswith("python -m ep bench: FileNotFoundError: ")
    assert done.stderr.count("\n") == 1 and "out.json" in done.stderr
