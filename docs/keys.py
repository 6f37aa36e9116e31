"""Writes what follows from declarations: the rules in docs/privacy.md, the keys in pyproject.toml."""

import json
from pathlib import Path

from pbfl_flwr.config import GROUPS, Group
from pbfl_flwr.experiments.catalogue import rules_table
from pbfl_flwr.methods import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
TABLE = "[tool.flwr.app.config"
RULES_BEGIN, RULES_END = "<!-- rules: make keys -->\n\n", "<!-- end of rules -->"
ALL_NODES = {"num-clients": 0}  # so that plain `flwr run` uses the nodes of its simulation, however many


def lines(group: type[Group]) -> list[str]:
    """Return ``key = default`` for every key of a group, in TOML."""
    defaults = group().model_dump(by_alias=True)
    return [f"{key} = {json.dumps(ALL_NODES.get(key, value))}" for key, value in defaults.items()]


def config_block() -> str:
    """Return the keys as Flower reads them: the common ones, then a table for each method with keys of its own."""
    blocks = [f"{TABLE}]"]
    for name, group in GROUPS.items():
        blocks += [f"# {name}", *lines(group)]
    for name, group in SECTIONS.items():
        blocks += ["", f"{TABLE}.{name}]", *lines(group)]
    return "\n".join(blocks) + "\n"


if __name__ == "__main__":
    privacy = ROOT / "docs" / "privacy.md"
    before, _, after = privacy.read_text(encoding="utf-8").partition(RULES_BEGIN)
    after = after.partition(RULES_END)[2]
    privacy.write_text(f"{before}{RULES_BEGIN}{rules_table()}\n{RULES_END}{after}", encoding="utf-8")
    project = ROOT / "pyproject.toml"
    rest = project.read_text(encoding="utf-8").partition(f"{TABLE}]")[0]  # the block is the file's last part
    project.write_text(rest + config_block(), encoding="utf-8")
