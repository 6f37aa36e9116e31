"""pbfl privacy: every method declares what its uploads tell, and settings change what is said."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pbfl_flwr.config import Scalar, parse
from pbfl_flwr.experiments.disclosure import about, disclosures
from pbfl_flwr.method import Method
from pbfl_flwr.methods import METHODS, PROTECTED, SECTIONS, build_method, privacy_notes
from pbfl_flwr.payloads import Nothing, Prototypes
from tests.small_runs import pbfl


def states(**keys: Scalar) -> dict[tuple[str, str], str]:
    flat = {key.replace("_", "-"): value for key, value in keys.items()}
    return {(one.message, one.what): one.state for one in disclosures(parse(flat, SECTIONS))}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_its_uploads_reveal(name: str) -> None:
    method = build_method(parse({"method": name}, SECTIONS))
    found = method.reveals()
    assert (found == ()) == (method.up is Nothing)
    assert len({one.what for one in found}) == len(found), "one thing is said twice"
    for one in found:
        assert one.what
        assert one.how
        assert one.message in ("upload", "broadcast")
    if name not in PROTECTED:  # no setting may be promised that would be refused
        assert not any("dp-noise" in one.hide or "min-class-count" in one.hide for one in found)


def test_no_setting_is_promised_to_a_method_that_none_protects() -> None:
    other = SimpleNamespace(up=Prototypes, protects_uploads=False)
    assert not any(reveal.hide for reveal in Method.reveals(cast(Any, other)))


def test_payloads_that_carry_counts_say_so() -> None:
    for name in METHODS:
        method = build_method(parse({"method": name}, SECTIONS))
        says = any(one.what == "samples of each class" and one.state != "hidden" for one in method.reveals())
        carries = name in ("fedgen", "fedpa", "fednh", "gfpl", "tinyproto")  # tinyproto in the rows' length
        assert says == carries, name


def test_the_default() -> None:
    found = states()
    assert found["upload", "features of single samples"] == "hidden"
    assert found["upload", "class means of features"] == "in clear"
    assert found["upload", "samples of each class"] == "hidden"
    assert states(protocol="htfl")["upload", "features of single samples"] == "in clear"


def test_settings_hide_what_they_say() -> None:
    assert states(aggregation="weighted")["upload", "samples of each class"] == "in clear"
    assert states(aggregation="weighted", count_bucket=10)["upload", "samples of each class"] == "blurred"
    assert states(aggregation="ppa")["upload", "samples of each class"] == "blurred"  # the rows' length tells
    assert states(aggregation="ppa")["upload", "number of training samples"] == "in clear"
    dense: dict[str, Scalar] = {"aggregation": "ppa", "total_examples": 9, "dense_uploads": True}
    assert states(**dense)["upload", "which classes the client holds"] == "blurred"
    assert states(**dense)["upload", "size of the message"] == "hidden"
    noisy = states(**dense, dp_clip=1.0, dp_noise=1.0)
    assert noisy["upload", "which classes the client holds"] == "hidden"
    assert noisy["upload", "sums of features of each class"] == "blurred"
    silent = states(client_report="none")
    assert {state for (message, _), state in silent.items() if message == "report"} == {"hidden"}
    assert silent["handshake", "number of training and test samples"] == "hidden"
    assert states()["report", "test samples of each class"] == "hidden"
    counted = states(per_class=True, **dense, dp_clip=1.0, dp_noise=1.0)
    assert counted["report", "test samples of each class"] == "in clear"


def test_a_default_that_does_not_reach_a_method_is_said() -> None:
    def notes(**keys: Scalar) -> list[str]:
        settings = parse(keys, SECTIONS)
        return privacy_notes(settings, build_method(settings))

    assert notes(method="fedproto") == notes(method="fedavg") == notes(method="fedgh") == []
    (line,) = notes(method="fedcpd")
    assert line.startswith("min-class-count = 2 does not apply: method 'fedcpd' sends WeightsAndPrototypes")
    assert notes(method="fedcpd", protocol="pfl") == []


def test_the_command() -> None:
    table = pbfl("privacy", "--set", "method=gfpl")
    assert table.exit_code == 0
    assert "distribution" in table.output
    noisy = pbfl("privacy", "fedproto-digits", "--set", "dp-clip=1", "--set", "dp-noise=2", "--json")
    answer = json.loads(noisy.output)
    assert answer == about(parse({"method": "fedproto", "dp-clip": 1, "dp-noise": 2}, SECTIONS))
    assert answer["epsilon"]["covers"] == "the rows, given which classes are sent"
    assert answer["epsilon"]["one release"] < answer["epsilon"]["20 releases"]
    new = {"new-clients": 1, "new-client-rounds": 50}
    late = about(parse({"method": "fedproto", "dp-clip": 1, "dp-noise": 2, **new}, SECTIONS))["epsilon"]
    assert late["50 releases"] > late["20 releases"] == answer["epsilon"]["20 releases"]
    wrong = pbfl("privacy", "--set", "dp-noise=2")
    assert wrong.exit_code == 2
    assert "dp-noise needs a clipping norm" in wrong.output
