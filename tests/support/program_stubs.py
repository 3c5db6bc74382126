"""Stubs of programs that a test cannot use: pip and venv (which would download packages), apt-get,
docker, systemd and scripts/package. Each stub checks its arguments against the checkout and creates
the files that later commands of a page need. Usage: `python program_stubs.py NAME ARGUMENT...`.
PAGE_ROOT is the root directory of the simulated machine, `sluice` is the test's.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

HERE = Path(__file__).parents[2]
ROOT = Path(os.environ.get("PAGE_ROOT", "/nowhere"))
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))
UNITS = ROOT / "etc/systemd/system"


def refuse(why: str) -> None:
    sys.exit(f"{sys.argv[1]}: {why}")


def package(words: list[str]) -> None:
    """Stub of scripts/package; tests/project/test_package.py builds real packages."""
    parser = argparse.ArgumentParser(prog="scripts/package")
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("dist"))
    given = parser.parse_args(words)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag = "py3-none-any" if given.pure else f"{python}-{python}-{platform}"
    given.folder.mkdir(exist_ok=True)
    for name in (f"sluice-{version()}.tar.gz", f"sluice-{version()}-{tag}.whl"):
        (given.folder / name).touch()


def version() -> str:
    return re.findall(
        r'__version__.*= "(.+)"', (HERE / "src/sluice/__init__.py").read_text("utf-8")
    )[0]


def python(words: list[str]) -> None:
    """python3.11 -m venv DIR"""
    if words[:2] != ["-m", "venv"] or len(words) != 3:
        refuse(f"not the arguments of venv: {words}")
    tools = Path(words[2]) / "bin"
    tools.mkdir(parents=True)
    shutil.copy(shutil.which("pip") or "", tools / "pip")


def pip(words: list[str]) -> None:
    """pip install [--upgrade] [sluice.whl | sluice[extra] | package]..."""
    parser = argparse.ArgumentParser(prog="pip")
    parser.add_argument("verb", choices=["install"])
    parser.add_argument("--upgrade", action="store_true")
    parser.add_argument("what", nargs="+")
    project = PROJECT["project"]
    for what in parser.parse_args(words).what:
        if what.endswith(".whl"):
            if re.match(r"sluice-[\w.]+(-cp3\d+-cp3\d+-linux_x86_64)?\.whl$", what) is None:
                refuse(f"{what} is not the name of a wheel of Sluice")
            continue
        name, extras = re.fullmatch(r"(\w+)(?:\[([\w,]+)\])?", what).groups()  # type: ignore[union-attr]
        if name != "sluice" or not set((extras or "").split(",")) <= {
            "",
            *project["optional-dependencies"],
        }:
            refuse(f"there is no {what}")
    prefix = Path(os.environ["STUB_PATH"]).parent.parent
    if not prefix.is_relative_to(ROOT):
        return
    shutil.copy(shutil.which("sluice") or "", prefix / "bin/sluice")
    for folder, names in PROJECT["tool"]["setuptools"]["data-files"].items():
        (prefix / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(HERE / name, prefix / folder)


def apt_get(words: list[str]) -> None:
    """apt-get install PACKAGE: accepts what scripts/test would install."""
    if words[0] != "install" or any(
        word not in (HERE / "scripts/test").read_text("utf-8") for word in words[1:]
    ):
        refuse(f"scripts/test does not install {words}")


def systemctl(words: list[str]) -> None:
    verb, *rest = words
    if verb == "daemon-reload" and not rest:
        return
    if verb not in ("enable", "start", "stop", "restart", "reload", "status"):
        refuse(f"there is no verb {verb}")
    flags = [word for word in rest if word.startswith("-")]
    [unit] = [word for word in rest if word not in flags]
    if set(flags) - ({"--now"} if verb == "enable" else set()):
        refuse(f"{verb} has no {flags}")
    read = unit_of(unit)
    program, _, arguments = read["Service"]["ExecStart"].partition(" ")
    if not os.access(ROOT / program[1:], os.X_OK):
        refuse(f"{unit}: there is no program {program}")
    if verb == "reload" and "ExecReload" not in read["Service"]:
        refuse(f"{unit} cannot be reloaded")
    [settings] = re.findall(r"--config (\S+)", arguments)
    tomllib.loads((ROOT / settings[1:]).read_text("utf-8"))
    if verb == "status":
        print(f"● {unit}.service - {read['Unit']['Description']}")


def journalctl(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="journalctl")
    parser.add_argument("-u", required=True)
    parser.add_argument("-f", action="store_true")
    unit_of(parser.parse_args(words).u)


def unit_of(name: str) -> configparser.RawConfigParser:
    path = UNITS / f"{name}.service"
    if not path.exists():
        refuse(f"there is no unit {name}: {path}")
    read = configparser.RawConfigParser(strict=False)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read(path)
    return read


def docker(words: list[str]) -> None:
    """Build nothing, and run commands of a container here, with its volume below PAGE_ROOT."""
    images = ROOT / "images"
    images.mkdir(exist_ok=True, parents=True)
    parser = argparse.ArgumentParser(prog="docker")
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build")
    build.add_argument("-f", required=True, type=Path)
    build.add_argument("-t", required=True)
    build.add_argument("context", type=Path)
    run = verbs.add_parser("run")
    for flag in ("--rm", "-it", "-d", "--read-only"):
        run.add_argument(flag, action="store_true")
    for flag in ("--name", "--entrypoint", "--stop-timeout", "--network"):
        run.add_argument(flag)
    for flag in ("-v", "-e", "-p", "--tmpfs", "--cap-drop"):
        run.add_argument(flag, action="append", default=[])
    run.add_argument("image")
    run.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    recipe = (HERE / "packaging/Containerfile").read_text("utf-8")
    if given.verb == "build":
        if (HERE / given.context / given.f).read_text("utf-8") != recipe:
            refuse(f"{given.f} is not the recipe")
        (images / given.t).touch()
        return
    if not (images / given.image).exists():
        refuse(f"there is no image {given.image}")
    for port in given.p:
        if port.split(":")[1] not in " ".join(re.findall("^EXPOSE (.*)$", recipe, re.MULTILINE)):
            refuse(f"the image does not expose {port}")
    places = {
        inside: ROOT / "volumes" / name for name, inside in (one.split(":") for one in given.v)
    }
    for inside, outside in places.items():
        if f"VOLUME {inside}\n" not in recipe:
            refuse(f"{inside} is no volume of the image")
        outside.mkdir(parents=True, exist_ok=True)

    def here(word: str) -> str:
        for inside, outside in places.items():
            word = re.sub(rf"(?<![\w/]){inside}/", f"{outside}/", word)
        return word

    environ = {**os.environ, **dict(here(one).split("=", 1) for one in given.e)}
    command = [given.entrypoint or "sluice", *map(here, given.words)]
    if not given.entrypoint:
        command = ["sluice", "serve", "--data", here("/data/store"), *map(here, given.words)]
        if not given.words:  # the addresses of the image, but loopback and free ports
            command += [
                word for flag in ("--mqtt", "--http", "--grpc") for word in (flag, "127.0.0.1:0")
            ]
    sys.exit(subprocess.run(command, env=environ).returncode)


PROGRAMS = {
    "apt-get": apt_get,
    "docker": docker,
    "journalctl": journalctl,
    "package": package,
    "pip": pip,
    "python3.11": python,
    "systemctl": systemctl,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2:])
