"""The files in docs/deploy: their commands are accepted, and the programs that read them accept them."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from typer.main import get_command

from pbfl_flwr.cli import app
from tests.small_runs import pbfl

ROOT = Path(__file__).parents[3]
FILES = ROOT / "docs" / "deploy"
UNITS = ("pbfl-superlink.service", "pbfl-supernode@.service")
ENV = "/srv/pbfl/env/bin"
GIVEN = {"SUPERLINK": "fl.example.org:9092", "PORT": "9094", "SERVER": "fl.example.org", "NAME": "site-a"}


def unit_commands(name: str) -> Iterator[list[str]]:
    """Yield the commands of a unit as systemd would call them."""
    text = (FILES / name).read_text().replace("\\\n", " ").replace("%i", GIVEN["NAME"])
    for command in re.findall(r"^Exec\w+=(.*)$", text, re.MULTILINE):
        yield shlex.split(Template(command).substitute(GIVEN))


def compose_commands(service: dict[str, Any], given: Mapping[str, str] = GIVEN) -> Iterator[list[str]]:
    """Yield the commands of a service, those of its shell one by one."""
    command = service["command"]
    if command[:2] != ["sh", "-c"]:
        yield command
        return
    for part in re.sub(r"\$\{(\w+)-\}", r"${\1}", command[2]).split("&&"):
        yield shlex.split(Template(part).substitute(given).replace("exec ", ""))


def accepted(words: list[str]) -> str:
    """Parse a command as its program does, and return the program's name."""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "pbfl":
        context = get_command(app).make_context("pbfl", arguments, resilient_parsing=True)
        group: Any = context.command
        _, command, rest = group.resolve_command(context, arguments)
        command.make_context(program, rest, parent=context)
    elif program == "flower-superlink":
        assert _parse_args_run_superlink().parse_args(arguments).enable_supernode_auth
    elif program == "flower-supernode":
        options = _parse_args_run_supernode().parse_args(arguments)
        assert (options.superlink, options.auth_supernode_private_key) == ("fl.example.org:9092", "site-a")
    else:
        assert program == "rm"
    return program


def test_the_units_call_what_there_is() -> None:
    superlink, supernode = ([accepted(words) for words in unit_commands(name)] for name in UNITS)
    assert superlink == ["flower-superlink"]
    assert supernode == ["rm", "pbfl", "flower-supernode"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for name in UNITS:  # systemd looks for the programs
        text = (FILES / name).read_text().replace(ENV, str(Path(sys.executable).parent))
        (tmp_path / name).write_text(text)
    paths = [tmp_path / "pbfl-superlink.service", tmp_path / "pbfl-supernode@site-a.service"]
    done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_starts_both_sides_and_lets_the_server_end_a_run() -> None:
    services = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    programs = {
        name: [accepted(words) for words in compose_commands(each)] for name, each in services.items()
    }
    assert programs == {
        "superlink": ["flower-superlink"],
        "supernode": ["rm", "pbfl", "flower-supernode"],
    }
    for each in services.values():
        assert each["stop_grace_period"] == "90s"
        assert each["logging"]["options"] == {"max-size": "20m", "max-file": "5"}
        place = FILES / each["build"]["context"]
        assert (place / each["build"]["dockerfile"]).read_text().startswith("# One image")
        assert place.resolve() == ROOT


def test_a_device_without_its_name_is_told_which_option_lacks_it() -> None:
    supernode = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]["supernode"]
    _, doctor, _ = compose_commands(supernode, {**GIVEN, "NAME": ""})
    found = pbfl(*doctor[1:])
    assert (found.exit_code, found.output) == (
        2,
        "error: --key '': must be a path, . for the current directory\n",
    )


def test_the_image_gets_all_that_the_package_is_made_of() -> None:
    text = (FILES / "Dockerfile").read_text()
    copied: dict[str, str] = {}
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *sources, target = line.split()
        copied |= {name: target + name if target.endswith("/") else target for name in sources}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    made_of = {"pyproject.toml", "README.md", "LICENSE", *wheel["packages"], *wheel["force-include"]}
    assert copied == {name: f"/opt/pbfl-flwr/{name}" for name in {"constraints.txt", *made_of}}
    assert all((ROOT / name).exists() for name in copied)


def test_the_alerts_use_metrics_that_there_are() -> None:
    source = (ROOT / "pbfl_flwr" / "sinks" / "prometheus.py").read_text()
    metrics = {f"pbfl_{name}" for name in re.findall(r'gauge\(\s*"(\w+)"', source)}
    metrics |= {f"pbfl_{name}_total" for name in re.findall(r'counter\(\s*"(\w+)"', source)}
    assert len(metrics) == 7
    (group,) = yaml.safe_load((FILES / "prometheus-rules.yaml").read_text())["groups"]
    used = {name for rule in group["rules"] for name in re.findall(r"pbfl_\w+", rule["expr"])}
    assert len(used) == 4
    assert used <= metrics


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    cases = Path(__file__).with_name("prometheus_rules_test.yaml").read_text()
    (tmp_path / "cases.yaml").write_text(cases.replace("RULES", str(FILES / "prometheus-rules.yaml")))
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "cases.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
