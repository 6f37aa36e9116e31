"""Writes what follows from declarations: the rules in docs/privacy.md, the keys in pyproject.toml, the page of keys."""

import json
from pathlib import Path

from pbfl_flwr.config import GROUPS, Group
from pbfl_flwr.experiments.catalogue import Key, keys
from pbfl_flwr.experiments.tables import Sheet
from pbfl_flwr.methods import SECTIONS
from pbfl_flwr.prototypes.rules import RULES, TELLS

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


def keys_page() -> str:
    """Return all keys as a Markdown page, which the site has."""
    lines = [
        "# All keys",
        "",
        "Every key of the run configuration, as printed by `pbfl list keys`. Keys can be set with `--set KEY=VALUE`,",
        "in a preset and with `flwr run --run-config`. `auto` follows the method, the protocol or the data.",
    ]
    for name, title, every in keys():
        rows = tuple((f"`{key.name}`", f"`{key.default}`", _description_cell(key)) for key in every)
        table = Sheet("", ("key", "default", "meaning [allowed values]"), rows, text_columns=3).markdown()
        lines += ["", f"## {name}", "", title, "", *table.splitlines()[2:]]
    return "\n".join(lines) + "\n"


def _description_cell(key: Key) -> str:
    """Return a key's meaning and allowed values as Markdown, with "<" and "*" escaped."""
    text = f"{key.meaning} [{key.allowed}]".lstrip()
    return text.replace("<", "&lt;").replace("*", "\\*")


def rules_table() -> str:
    """Return what each aggregation rule tells the server as a Markdown table, a part of docs/privacy.md."""
    lines = ["| `aggregation` | what a client sends | what it tells the server |", "|---|---|---|"]
    lines += [f"| `{name}` | {' | '.join(TELLS[rule.sends])} |" for name, rule in RULES.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    privacy = ROOT / "docs" / "privacy.md"
    before, _, after = privacy.read_text(encoding="utf-8").partition(RULES_BEGIN)
    after = after.partition(RULES_END)[2]
    privacy.write_text(f"{before}{RULES_BEGIN}{rules_table()}\n{RULES_END}{after}", encoding="utf-8")
    project = ROOT / "pyproject.toml"
    rest = project.read_text(encoding="utf-8").partition(f"{TABLE}]")[0]  # the block is the file's last part
    project.write_text(rest + config_block(), encoding="utf-8")
