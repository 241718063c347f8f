"""Engines in one process that each link their own copy of the library, of one version or of two."""

import pathlib
import re
import shutil

import pytest

import ep
from install import building

SOURCE = building.ROOT / "tests" / "install" / "plugins"
NAMESPACE = re.compile(r"\bep::(v\d+_\d+)::")


@pytest.fixture(scope="module")
def plugin(
    prefix: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, pathlib.Path]:
    """The program that loads plugins, and a plugin."""
    folder = tmp_path_factory.mktemp("plugin") / "build"
    building.build(SOURCE, folder, CMAKE_PREFIX_PATH=prefix)
    return folder / "host", folder / "libplugin.so"


@pytest.fixture(scope="module")
def other_prefix(prefix: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The same library as if its minor version were 9: only names and the number differ.

    The names in the archive keep their length, so its tables stay right.
    """
    folder = tmp_path_factory.mktemp("other") / "prefix"
    shutil.copytree(prefix, folder)
    (archive,) = folder.glob("lib*/**/libep.a")
    content = archive.read_bytes()
    major, minor, patch = ep.__version__.split(".")[:3]
    mine, others = f"v{major}_{minor}".encode(), f"v{major}_9".encode()
    assert b"4" + mine in content and len(mine) == len(others) == 4
    content = content.replace(b"4" + mine, b"4" + others)
    number = ep.__version__.encode() + b"\0"
    assert number in content
    archive.write_bytes(content.replace(number, f"{major}.9.{patch}".encode() + b"\0"))
    header = folder / "include" / "ep" / "version.hpp"
    text = re.sub(r"(#define EP_VERSION_MINOR) \d+", r"\1 9", header.read_text())
    header.write_text(text)
    return folder


def test_two_versions_in_one_process_do_not_meet(plugin, other_prefix, tmp_path):
    host, mine = plugin
    building.build(SOURCE, tmp_path / "build", CMAKE_PREFIX_PATH=other_prefix)
    theirs = tmp_path / "build" / "libplugin.so"
    major, _, patch = ep.__version__.split(".")[:3]
    for order in ((mine, theirs), (theirs, mine)):
        said = building.command(host, *order).splitlines()
        versions = {mine: ep.__version__, theirs: f"{major}.9.{patch}"}
        assert said == [*(versions[each] for each in order), "all plugins are right"]


def test_two_copies_of_one_version_do_not_disturb_each_other(plugin, tmp_path):
    host, mine = plugin
    copy = shutil.copy(mine, tmp_path / "libcopy.so")
    assert "all plugins are right" in building.command(host, mine, copy)


def test_headers_of_one_version_do_not_link_with_a_library_of_another(
    prefix, other_prefix, tmp_path
):
    """Headers newer than the library crashed at run time (DeepEP 605); both versions are named."""
    (library,) = prefix.glob("lib*/**/libep.a")
    include = other_prefix / "include"
    words = ["g++", "-std=c++20", "-shared", "-fPIC", "-Wl,-z,defs", "-I", include]
    done = building.attempt(*words, SOURCE / "plugin.cpp", library, "-o", tmp_path / "wrong.so")
    assert done.returncode != 0
    assert set(NAMESPACE.findall(done.stdout)) == {"v0_9"}, done.stdout


def test_an_engine_shows_nothing_of_the_library(plugin):
    """With the default visibility, what it shows of ep:: is what it compiled from the headers
    itself: inline functions, under the version's name."""
    _, mine = plugin
    said = building.command("nm", "--dynamic", "--defined-only", "--demangle", mine)
    shown = [line.split(maxsplit=2)[1:] for line in said.splitlines()]
    assert ["T", "plugin_run"] in shown
    of_ep = [(kind, name) for kind, name in shown if re.search(r"\bep::", name)]
    assert [entry for entry in of_ep if entry[0] not in "WVu"] == []
    assert [name for _, name in of_ep if re.search(r"\bep::(?!v\d+_\d+::)", name)] == []
