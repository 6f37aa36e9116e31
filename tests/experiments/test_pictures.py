"""Pictures: the numbers behind them against others' arithmetic, and what every one of them must have."""

import errno
import json
import math
import os
import shutil
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra 'report')")

from pbfl_flwr import data
from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments import artefacts, pictures, results
from pbfl_flwr.experiments.pictures import (
    alignment,
    features,
    personalisation,
    progress,
    similarity,
    style,
)
from pbfl_flwr.experiments.results import RunGroup
from pbfl_flwr.payloads import Prototypes
from pbfl_flwr.prototypes.alignment import geometry
from pbfl_flwr.runs.client_store import ClientState
from pbfl_flwr.runs.directory import BROADCAST
from pbfl_flwr.runs.tensor_files import load_tensors, save_tensors
from tests.flower.inprocess import federation
from tests.small_runs import columns, edit, entry, pbfl, write_lines, write_run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
EVERYWHERE = {
    "label-distribution",
    "accuracy-over-rounds",
    "accuracy-of-clients",
    "clients-over-rounds",
    "bytes-over-rounds",
    "accuracy-against-bytes",
    "prototypes-of-a-class",
    "global-prototypes",
    "cosine-of-prototypes",
    "distance-of-prototypes",
    "similarity-per-class",
    "margin-per-class",
    "alignment-distances",
    "alignment-energy",
    "alignment-over-rounds",
    "head-norms",
}
IN_THE_PLANE = {"data-points", "prototype-plane", "features"}


@pytest.fixture(scope="session")
def drawn(groups: list[RunGroup]) -> list[pictures.Section]:
    return pictures.draw(groups)


def kinds(sections: list[pictures.Section]) -> Counter[str]:
    return Counter(picture.name.rstrip("-0123456789") for section in sections for picture in section.pictures)


def test_three_runs_show_every_picture_of_the_papers(drawn: list[pictures.Section]) -> None:
    found = kinds(drawn)
    assert set(found) == EVERYWHERE
    assert {found[name] for name in ("label-distribution", "accuracy-over-rounds")} == {1}
    assert {found[name] for name in ("prototypes-of-a-class", "head-norms")} == {3}
    left_out = {line for section in drawn for line in section.left_out}
    assert "fedproto: fedproto does not align its prototypes" in left_out
    assert "protonorm: features have 64 dimensions; drawn only for feature-dim = 2" in left_out


def test_the_plane(plane_run: Path) -> None:
    sections = pictures.draw(results.load([plane_run]))
    found = kinds(sections)
    assert set(found) == EVERYWHERE | IN_THE_PLANE
    assert found["features"] == 2
    assert not [line for section in sections for line in section.left_out]


def test_every_picture_has_title_caption_and_labelled_axes(drawn: list[pictures.Section]) -> None:
    for section in drawn:
        for picture in section.pictures:
            assert picture.title, picture.name
            assert picture.caption.endswith("."), picture.name
            assert picture.figure.get_suptitle(), picture.name
            for axes in picture.figure.axes:
                assert axes.get_ylabel(), picture.name  # colour bars have theirs on this axis too
                assert axes.get_xlabel() or axes.get_label() == "<colorbar>", picture.name


def test_pictures_are_svg_png_or_pdf_files(drawn: list[pictures.Section]) -> None:
    pictures_drawn = [picture for section in drawn for picture in section.pictures]
    assert len({picture.name for picture in pictures_drawn}) == len(pictures_drawn)
    for picture in pictures_drawn:
        assert ET.fromstring(style.file_of(picture, "svg")).attrib["viewBox"]
    assert style.file_of(pictures_drawn[0], "png").startswith(b"\x89PNG")
    assert style.file_of(pictures_drawn[0], "pdf").startswith(b"%PDF")


def test_names_are_words_whatever_they_hold(hostile_run: Path) -> None:
    (section, *_) = pictures.draw(results.load([hostile_run]))
    root = ET.fromstring(style.file_of(section.pictures[0], "svg"))
    assert any("$\\frac{<img" in (element.text or "") for element in root.iter())


def test_without_the_clients_state_the_rest_is_drawn(three_runs: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "moved"
    shutil.copytree(three_runs[0], path)
    shutil.rmtree(path / "clients")
    (path / "partition.json").unlink()
    sections = pictures.draw(results.load([path]))
    assert {"accuracy-over-rounds", "global-prototypes", "similarity-per-class"} <= set(kinds(sections))
    reasons = [line for section in sections for line in section.left_out]
    assert (
        "fedproto: the clients' own state is not here: the run was moved without it, or its method stores none "
        "unless client-states = 'always'"
    ) in reasons
    assert "fedproto: clients bring their own data, whose labels are not counted" in reasons
    (path / "prototypes.safetensors").write_bytes(b"nonsense")
    reasons = [line for section in pictures.draw(results.load([path])) for line in section.left_out]
    assert any("prototypes.safetensors cannot be read" in line for line in reasons)


@pytest.mark.parametrize("unreadable", ["clients", "prototypes.safetensors"])
def test_what_may_not_be_read_is_left_out_alone(
    three_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    def refused(path: Path, exists: Callable[[Path], bool] = Path.exists) -> bool:
        if unreadable in path.parts:  # root may read everything
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    def opening(path: Any, *arguments: Any, real: Any = os.open, **keywords: Any) -> int:
        refused(Path(path), lambda path: True)
        opened: int = real(path, *arguments, **keywords)
        return opened

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(Path, "exists", refused)
    out = tmp_path / "page.html"
    result = pbfl("report", three_runs[0], "--out", out)
    assert result.exit_code == 0, result.stderr
    text = out.read_text(encoding="utf-8")
    assert "cannot be read (Permission denied)" in text
    assert 'id="accuracy-over-rounds"' in text
    assert ('id="head-norms-0"' in text) == (unreadable != "clients")
    assert ('id="cosine-of-prototypes-0"' in text) == (unreadable == "clients")


# The numbers behind them ----------------------------------------------------------------------------------


def test_the_alignment_redone_is_the_alignment_done(groups: list[RunGroup]) -> None:
    record = groups[2].first
    found = artefacts.alignment_trajectory(record)
    figures = record.rounds[-1].server_metrics
    assert len(found.steps) - 1 == figures["alignment-iterations"]
    assert found.steps[0].energy == pytest.approx(figures["alignment-energy-before"], abs=1e-9)
    assert found.steps[-1].energy == pytest.approx(figures["alignment-energy-after"], abs=1e-9)
    sent = artefacts.global_prototypes(record)
    assert geometry(sent.values[sent.present]).min_distance == pytest.approx(
        found.steps[-1].min_distance, abs=1e-5
    )


def test_sparse_prototypes_stand_in_their_own_dimensions(groups: list[RunGroup]) -> None:
    sent = artefacts.global_prototypes(groups[1].first)
    assert sent.values.shape == (10, 64)
    assert int((sent.values != 0).sum(dim=1).max()) <= 8
    for local in artefacts.local_prototypes(groups[1].first).values():
        outside = (sent.values == 0) & sent.present[:, None]
        # ReLU features are zero here and there; what is not zero lies where the server's may be.
        assert not bool((local.values[outside] > 0).any())


def test_sums_become_prototypes_as_the_clients_use_them(groups: list[RunGroup]) -> None:
    """APS broadcasts sums over samples; distances to features and between prototypes are those of μ times them."""
    run = groups[1].first
    tensors = load_tensors(run.path / BROADCAST)[0]
    lengths, n = tensors["rows"].double().norm(dim=1), float(tensors["n"])
    K = len(lengths)
    expected = (
        torch.minimum(0.9 * lengths, lengths.mean()) * K / n
    )  # 0.9·K/n, no row above the average times K/n
    found = artefacts.global_prototypes(run).values[tensors["labels"].long()].double().norm(dim=1)
    assert torch.allclose(found, expected, rtol=1e-5)


def test_rows_of_another_width_are_no_prototypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's method may send variances beside the means."""
    monkeypatch.syspath_prepend(EXAMPLES)
    path = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)], method="varproto:build")
    sent = Prototypes(torch.ones(3, 8), torch.ones(3, dtype=torch.bool))
    save_tensors(path / BROADCAST, sent.to_tensors(), {})
    with pytest.raises(PbflError, match="the method's rows have 8 numbers, prototypes 4"):
        artefacts.global_prototypes(results.FinishedRun.load(path, ["varproto:build"]))


def test_simplex_and_angle() -> None:
    # Two points: opposite, distance 2, energy ln(1/2). Three: 120°, distance √3, energy -3·ln √3.
    assert alignment.optimum(2, 1) == pytest.approx((-math.log(2), 2.0))
    assert alignment.optimum(3, 2) == pytest.approx((-1.5 * math.log(3), 3**0.5))
    assert alignment.optimum(4, 2) is None
    assert alignment.least_angle(2**0.5) == pytest.approx(90)
    assert alignment.least_angle(3**0.5) == pytest.approx(120)


def test_similarities_distances_margins() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
    assert similarity.similarities(rows)[0, 1] == pytest.approx(0)
    assert similarity.similarities(rows)[0, 2] == pytest.approx(-1)
    assert np.isnan(similarity.distances(rows)[1, 1])
    assert similarity.distances(rows)[1, 2] == pytest.approx(13**0.5)
    assert similarity.margins(rows) == pytest.approx([(5 / 13) ** 0.5, (5 / 13) ** 0.5, 1])  # √5, √5, √13


def test_a_class_has_its_own_place_where_others_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run lacks the prototype of class 0."""
    rows, runs = torch.tensor([[3.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 1, 0]]), []
    tables = {"a": torch.ones(3, dtype=torch.bool), "b": torch.tensor([False, True, True])}
    for name, method in (("a", "fedproto"), ("b", "fedtgp")):
        runs.append(write_run(tmp_path / name, [entry(1, 0.5, 0.5)], method=method))
    monkeypatch.setattr(similarity, "global_prototypes", lambda run: Prototypes(rows, tables[run.path.name]))
    drawn = [item for item in similarity.per_class(results.load(runs)) if isinstance(item, style.Picture)]
    assert len(drawn) == 2
    for picture in drawn:
        axes = picture.figure.axes[0]
        assert [list(np.asarray(line.get_xdata())) for line in axes.lines] == [[0, 1, 2], [1, 2]]
        assert len(axes.get_xticks()) == 3


def test_a_run_keeps_its_colour_where_another_has_nothing_to_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(run: results.FinishedRun) -> Prototypes:
        if run.path.name == "a":
            raise PbflError("no prototypes")
        return Prototypes(torch.eye(3, 4), torch.ones(3, dtype=torch.bool))

    runs = [write_run(tmp_path / name, [entry(1, 0.5, 0.5)], method=name) for name in ("a", "fedproto")]
    monkeypatch.setattr(similarity, "global_prototypes", read)
    reason, *drawn = similarity.per_class(results.load(runs))
    assert str(reason) == "a: no prototypes"
    for picture in drawn:
        assert isinstance(picture, style.Picture)
        assert [line.get_color() for line in picture.figure.axes[0].lines] == [style.COLOURS[1]]


def test_bytes_where_nothing_travels_at_first(tmp_path: Path) -> None:
    """GFPL's first exchange is in round 10 by default."""
    nothing = {"payload": 0, "application": 20, "total": 100}
    quiet = entry(1, 0.5, 0.5, bytes_up=nothing, bytes_down=nothing)
    run = write_run(tmp_path / "run", [quiet, entry(2, 0.5, 0.75)], method="gfpl")
    (picture,) = progress.accuracy_against_bytes(results.load([run], by="global"))
    assert isinstance(picture, style.Picture)
    (line,) = picture.figure.axes[0].lines
    assert list(np.asarray(line.get_xdata())) == [0, 800]


def test_curves_over_seeds_of_unequal_length(tmp_path: Path) -> None:
    """Seed 0 has 2 rounds, seed 1 has 3: the mean of both is known for two."""
    lines = [entry(number, 0.5, share) for number, share in ((1, 0.25), (2, 0.5), (3, 1.0))]
    write_run(tmp_path / "a", lines[:2], **{"num-server-rounds": 3, "patience": 1})
    write_run(tmp_path / "b", lines, seed=1, patience=1)
    local = write_run(tmp_path / "local", lines, method="local", patience=1)
    said = "drawn for the rounds that all seeds have"
    (picture,) = progress.accuracy_over_rounds(results.load([tmp_path / "a", tmp_path / "b", local]))
    assert isinstance(picture, style.Picture)
    assert picture.caption.endswith(f"{said}: fedproto.")
    ends = [
        (np.asarray(line.get_xdata())[-1], np.asarray(line.get_ydata())[-1])
        for line in picture.figure.axes[0].lines
    ]
    assert ends == [(2, 50.0), (3, 100.0)]
    (picture,) = progress.accuracy_over_rounds(results.load([tmp_path / "b", local]))
    assert isinstance(picture, style.Picture)
    assert said not in picture.caption


def test_a_run_has_one_colour_in_all_pictures(tmp_path: Path) -> None:
    """Local has no global prototypes; the run after it is drawn as everywhere else."""
    local = write_run(tmp_path / "local", [entry(1, 0.5, None), entry(2, 0.5, None)], method="local")
    other = write_run(tmp_path / "other", [entry(1, 0.5, 0.5), entry(2, 0.5, 0.75)])
    groups = results.load([local, other], by="global")
    curves = {}
    for kind in (progress.accuracy_over_rounds, progress.accuracy_against_bytes):
        (picture,) = (item for item in kind(groups) if isinstance(item, style.Picture))
        (curves[kind],) = picture.figure.axes[0].lines
    assert {line.get_color() for line in curves.values()} == {style.COLOURS[1]}


def test_legends_name_every_curve(tmp_path: Path) -> None:
    """Matplotlib leaves labels out that begin with an underscore."""
    runs = [
        write_run(tmp_path / name, [entry(1, 0.5, 0.5), entry(2, 0.5, 0.75)]) for name in ("_base", "other")
    ]
    (picture,) = progress.accuracy_over_rounds(results.load(runs))
    assert isinstance(picture, style.Picture)
    (legend,) = picture.figure.legends
    assert [text.get_text().lstrip("\u200b") for text in legend.get_texts()] == ["_base", "other"]


def of_rows(names: list[str]) -> style.Picture:
    """A picture with a curve for each name."""
    with style.styled():
        figure, (axes,) = style.canvas()
        for number, name in enumerate(names):
            style.curve(axes, [1, 2], [number, number + 1], name, number)
        style.curve_axes(axes, "round", "accuracy (%)", whole=True)
        picture = style.titled_picture("rows", "Accuracy over rounds", "Rows.", figure)
        figure.draw_without_rendering()
    return picture


@pytest.mark.parametrize(
    ("end", "rows", "grows"),
    [
        ("", 12, False),
        (" of a longer name", 6, False),  # in one column
        (" of a longer name", 7, True),
        ("", 40, True),
        (" of a name of a hundred characters" * 3, 40, True),
        ("_in_one_word" * 8, 40, True),
    ],
)
def test_many_or_long_names_leave_the_curves_their_room(end: str, rows: int, grows: bool) -> None:
    usual = of_rows(["a", "b", "c"]).figure
    names = [f"row {number:02}{end}" for number in range(rows)]
    figure = of_rows(names).figure
    (legend,) = figure.legends
    assert ["".join(text.get_text().split()) for text in legend.get_texts()] == [
        "".join(name.split()) for name in names
    ]
    assert (figure.get_figheight() > usual.get_figheight()) == grows
    page, box, axes = figure.bbox, legend.get_window_extent(), figure.axes[0].get_window_extent()
    assert page.x0 <= box.x0 < box.x1 <= page.x1
    assert page.y0 <= box.y0 < box.y1 < axes.y0
    least = 0.8 if grows else 0.5
    assert least < axes.height / usual.axes[0].get_window_extent().height < 1


def test_forty_nine_curves_differ() -> None:
    styles = [style.curve_style(number) for number in range(49)]
    first = [(each["color"], each["marker"], each["linestyle"]) for each in styles[:7]]
    assert first == list(zip(style.COLOURS, style.MARKERS, style.DASHES, strict=True))
    for kind in ("marker", "linestyle"):
        assert len({(each["color"], each[kind]) for each in styles}) == 49


def test_classes_of_nearly_one_name_are_two_in_the_legend() -> None:
    names = ["photographs of cats", "photographs of dogs"]
    figure, (axes,) = style.canvas()
    features._points(axes, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 0]), names)
    features._plane(figure, axes, "x", "y", names)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names


@pytest.mark.parametrize("kind", style.KINDS)
def test_characters_that_the_font_lacks_warn_nobody(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert style.file_of(of_rows(["a rocket \N{ROCKET}", "原型"]), kind)


def test_a_line_a_client(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [entry(1, 0.5, 0.5), entry(2, 0.5, 0.75)], **{"num-clients": 120})
    for number in (1, 2):
        correct = [{} if client in (0, 7) else {"global": number * client % 200} for client in range(120)]
        tests = [0 if client in (0, 7) else 200 for client in range(120)]
        write_lines(path / "clients.jsonl", columns(number, correct, num_test=tests))
    groups = results.load([path])
    curves = groups[0].first.client_curves()
    assert sorted(curves) == [client for client in range(1, 120) if client != 7]
    assert curves[90] == [(1, 0.45), (2, 0.9)]
    (picture,) = progress.clients_over_rounds(groups)
    assert isinstance(picture, style.Picture)
    thin = [line for line in picture.figure.axes[0].lines if line.get_linewidth() < 1]
    assert len(thin) == progress.MOST_LINES
    ends = [float(np.asarray(line.get_ydata())[-1]) for line in thin]
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (0.0, 99.0)
    assert "50 of the 118 clients, evenly spaced from the worst to the best" in picture.caption
    (bold,) = [line for line in picture.figure.axes[0].lines if line.get_label() == "all"]
    assert np.asarray(bold.get_ydata())[-1] == 75.0


def test_normalised_columns() -> None:
    found = personalisation.normalised_columns(np.array([[0.0, 5.0], [2.0, 5.0], [8.0, 5.0]]))
    assert found.tolist() == [[0.0, 0.0], [0.25, 0.0], [1.0, 0.0]]


def test_rows_of_a_deeper_classifier_are_those_of_its_last_layer(tmp_path: Path) -> None:
    # the names of ten layers are in no alphabetical order
    federation(
        tmp_path, "local", on_disk=True, num_server_rounds=1, models="cnn4,cnn4+12,cnn4+10-10-10-10-10-10"
    ).run()
    record = results.FinishedRun.load(tmp_path / "run")
    norms, clients = personalisation._head_rows(record)
    last = ["head.weight", "head.2.weight", "head.12.weight", "head.weight", "head.2.weight"]
    assert clients == [0, 1, 2, 3, 4]
    for row, name, (_, state) in zip(norms, last, artefacts.client_states(record), strict=True):
        np.testing.assert_allclose(row, torch.linalg.vector_norm(state.model[name].double(), dim=1))


def test_code_that_a_run_names_is_imported_only_for_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strange_page.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from pbfl_flwr.methods.local import build\n"
        "from pbfl_flwr.models.build import build_model\n"
        "net = lambda task: build_model('mlp5', task, 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = write_run(tmp_path / "run", [entry(1, 0.5, 0.5)])
    about = json.loads((path / "run.json").read_text())
    about["configuration"]["method"] = "strange_page:build"
    about["clients"][0]["architecture"] = "strange_page:net"
    edit(path / "run.json", **about)
    record = results.FinishedRun.load(path)
    with pytest.raises(PbflError, match="'strange_page:build' is code to be allowed: --import"):
        artefacts.method_of(record)
    with pytest.raises(PbflError, match="'strange_page:net' is code to be allowed"):
        artefacts.network(record, 0, ClientState(1, 1, {}))
    pbfl("report", path, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()
    assert not (tmp_path / "ran").exists()
    assert artefacts.method_of(results.FinishedRun.load(path, ["strange_page:build"])).name == "local"
    assert (tmp_path / "ran").exists()


def test_clients_data_of_one_run_are_read_and_partitioned_once(
    plane_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_pool = Mock(wraps=data.load_pool)
    monkeypatch.setattr(data, "load_pool", load_pool)
    run, loaded = results.FinishedRun.load(plane_run), data.LoadedData()
    for client in run.about.clients:
        together, alone = artefacts.data_of(run, client.client, loaded), artefacts.data_of(run, client.client)
        assert torch.equal(together.test.inputs, alone.test.inputs)
    assert len(run.about.clients) > 1
    assert load_pool.call_count == 1 + len(run.about.clients)  # and once for each that was read alone


def test_nothing_is_downloaded_for_a_picture(plane_run: Path, tmp_path: Path) -> None:
    shutil.copytree(plane_run, tmp_path / "run")
    about = (tmp_path / "run" / "run.json").read_text()
    about = about.replace('"spiral"', '"cifar10"').replace('"download": false', '"download": true')
    about = about.replace('"data-dir": ""', f'"data-dir": "{tmp_path}"')
    (tmp_path / "run" / "run.json").write_text(about)
    with pytest.raises(PbflError, match=r"not found.*set data-dir"):
        artefacts.data_of(results.FinishedRun.load(tmp_path / "run"), 0)
