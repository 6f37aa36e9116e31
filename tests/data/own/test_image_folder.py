import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data import check_data, load_pool
from pbfl_flwr.data.own.image_folder import one_image
from pbfl_flwr.data.own.images import decode_images
from pbfl_flwr.errors import PbflError


def test_an_image_folder_without_a_test_part_and_with_odd_sizes(tmp_path, write_image):
    write_image(tmp_path / "set" / "cat" / "a.png", (1, 2, 3), (6, 4))
    write_image(tmp_path / "set" / "cat" / "b.png", 50, (12, 12))  # grey, other size
    write_image(tmp_path / "set" / "dog" / "c.png", (7, 8, 9), (6, 4))
    settings = DataSettings(dataset="image-folder", data_dir=str(tmp_path / "set"), partition="iid")
    pool = load_pool(settings)
    assert pool.inputs.shape == (3, 3, 4, 6)
    assert pool.inputs[1, :, 0, 0].tolist() == [50, 50, 50]
    assert pool.num_train == 3
    assert pool.label_names == ("cat", "dog")
    assert check_data(settings, 3).notes == (
        "1 of 3 images were resized to 6x4, the size of the first image",
    )


def test_names_with_a_leading_dot_are_neither_classes_nor_images(tmp_path, write_image):
    folder = tmp_path / ".data" / "photos"  # above the folder it does not count
    for name in ("cat/a.png", "cat/.thumbs/a.png", "dog/b.png", ".git/c.png"):
        write_image(folder / name, 3)
    (folder / "dog" / "._b.png").write_bytes(b"what macOS writes beside a picture")
    pool = load_pool(DataSettings(dataset="image-folder", data_dir=str(folder)))
    assert (pool.label_names, pool.labels.tolist()) == (("cat", "dog"), [0, 1])
    assert [note.partition(" files ignored")[0] for note in pool.notes] == ["2"]


def test_a_folder_of_images_that_may_not_be_read_is_not_passed_over(tmp_path, write_image, unreadable):
    for path in ("cat/a.png", "cat/more/b.png", "dog/c.png", ".trash/d.png"):
        write_image(tmp_path / path, 3)
    settings = DataSettings(dataset="image-folder", data_dir=str(tmp_path))
    unreadable(tmp_path / ".trash")
    assert len(load_pool(settings).labels) == 3
    unreadable(tmp_path / "cat" / "more")
    with pytest.raises(PbflError, match=r"/cat/more cannot be read \(Permission denied\)"):
        load_pool(settings)


def test_folders_with_the_name_of_a_class_in_another_form(tmp_path, write_image):
    for path in ("set/Ka\u0308fer/a.png", "set/Kuh /b.png"):
        write_image(tmp_path / path, 3)
    settings = DataSettings(dataset="image-folder", data_dir=str(tmp_path / "set"))
    pool = load_pool(settings)
    assert (pool.label_names, pool.labels.tolist()) == (("Kuh", "K\u00e4fer"), [1, 0])
    pool = load_pool(settings.model_copy(update={"labels": "K\u00e4fer,Hund,Kuh"}))
    assert pool.labels.tolist() == [0, 2]
    write_image(tmp_path / "set/K\u00e4fer/a.png", 3)
    with pytest.raises(PbflError, match="two folders of the class 'K\u00e4fer'"):
        load_pool(settings)


def test_a_folder_whose_name_is_no_text(tmp_path, write_image):
    for name in (b"K\xe4fer", b"Katze"):
        write_image(tmp_path / os.fsdecode(name) / "a.png", 3)
    with pytest.raises(PbflError, match=r"class 'K\\udce4fer' is not UTF-8; rename it"):
        load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path)))


def test_parts_of_a_set_are_no_classes(tmp_path, write_image):
    for path in ("cased/Train/cat/a.png", "cased/Train/dog/a.png", "cased/Test/cat/a.png"):
        write_image(tmp_path / path, 3)
    with pytest.raises(
        PbflError, match=r"holds Test, Train, which would become the classes; must be train/<class>"
    ):
        load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path / "cased")))
    named = DataSettings(dataset="image-folder", data_dir=str(tmp_path / "cased/Train"), labels="cat,dog")
    assert len(load_pool(named).labels) == 2
    for name in ("val", "test"):
        write_image(tmp_path / "named" / name / "a.png", 3)
    named = named.model_copy(update={"data_dir": str(tmp_path / "named"), "labels": "test,val"})
    assert load_pool(named).label_names == ("test", "val")
    for path in ("set/train/cat/a.png", "set/train/dog/a.png", "set/val/cat/a.png", "set/.git/a.png"):
        write_image(tmp_path / path, 3)
    pool = load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path / "set")))
    assert (len(pool.labels), pool.notes) == (2, ("folders ignored next to train and test: val",))


def test_a_part_beside_the_classes_is_no_class(tmp_path, write_image):
    for path in ("cat/0", "dog/0", "val/cat/0", "val/dog/0"):
        write_image(tmp_path / "set" / f"{path}.png", 3)
    settings = DataSettings(dataset="image-folder", data_dir=str(tmp_path / "set"))
    with pytest.raises(
        PbflError, match=r"set holds val, which would become the classes; must be train/<class>"
    ):
        load_pool(settings)
    assert load_pool(settings.model_copy(update={"labels": "cat,dog,val"})).labels.tolist() == [0, 1, 2, 2]
    write_image(tmp_path / "set" / "val" / "1.png", 3)
    assert load_pool(settings).label_names == ("cat", "dog", "val")


def test_images_behind_a_link_count_as_all_others(tmp_path, write_image):
    for path in ("set/cat/0.png", "set/dog/0.png", "scans/0.png", "scans/1.png"):
        write_image(tmp_path / path, 3)
    (tmp_path / "scans" / "notes.txt").write_text("no image")
    (tmp_path / "set" / "cat" / "more").symlink_to(tmp_path / "scans")
    pool = load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path / "set")))
    assert pool.labels.tolist() == [0, 0, 0, 1]
    assert [note.partition(" files ignored")[0] for note in pool.notes] == ["1"]


@pytest.mark.parametrize("links", [{"cat/latest": "cat"}, {"cat/more": "scans", "scans/back": "cat"}])
def test_a_link_that_leads_back_is_refused(tmp_path, write_image, links):
    for path in ("cat/0.png", "dog/0.png", "scans/0.png"):
        write_image(tmp_path / path, 3)
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    with pytest.raises(
        PbflError, match=rf"is a link back to {tmp_path}/cat, which contains it; remove the link"
    ):
        load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path)))
    (tmp_path / next(reversed(links))).unlink()
    (tmp_path / "cat/.cache").mkdir()
    (tmp_path / "cat/.cache/up").symlink_to(tmp_path / "cat")
    load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path)))


def test_an_image_folder_that_cannot_be_used_says_why(tmp_path, write_image):
    def load(path: Path) -> None:
        load_pool(DataSettings(dataset="image-folder", data_dir=str(path)))

    with pytest.raises(PbflError, match="does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "ok.npz").write_bytes(b"")
    with pytest.raises(PbflError, match=r"ok\.npz is a file; it should be a folder with train/<class>/"):
        load(tmp_path / "ok.npz")
    (tmp_path / "none").mkdir()
    with pytest.raises(PbflError, match="should hold <class>/"):
        load(tmp_path / "none")
    write_image(tmp_path / "a" / "train" / "cat" / "0.png", 3)
    write_image(tmp_path / "a" / "train" / "dog" / "0.png", 3)
    write_image(tmp_path / "a" / "test" / "cow" / "0.png", 3)
    with pytest.raises(PbflError, match="classes that train/ lacks: \\['cow'\\]"):
        load(tmp_path / "a")
    write_image(tmp_path / "b" / "cat" / "0.png", 3)
    with pytest.raises(
        PbflError, match="has only the class 'cat'; must be 2 classes or more; set labels to all"
    ):
        load(tmp_path / "b")
    write_image(tmp_path / "b" / "dog" / "0.png", 3)
    (tmp_path / "b" / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(PbflError, match=r"1\.png is not a readable image"):
        load(tmp_path / "b")


def folder_of(place: Path, name: str, save: Callable[[Path], object]) -> DataSettings:
    """Two classes with one image each, which is written by this function."""
    for label in ("cat", "dog"):
        (place / label).mkdir()
        save(place / label / name)
    return DataSettings(dataset="image-folder", data_dir=str(place))


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_applies_the_exif_orientation(tmp_path, name, orientation):
    light = np.zeros((16, 32, 3), dtype=np.uint8)  # as it is to be seen: light at the top on the left
    light[:8, :8] = 255
    stored = {
        1: light, 2: light[:, ::-1], 3: light[::-1, ::-1], 4: light[::-1],
        5: light.transpose(1, 0, 2), 6: np.rot90(light), 7: np.rot90(light.transpose(1, 0, 2), 2),
        8: np.rot90(light, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored))
    pool = load_pool(folder_of(tmp_path, name, lambda path: image.save(path, exif=exif)))
    assert pool.input_shape == (3, 16, 32)
    difference = pool.inputs[0].transpose(1, 2, 0).astype(int) - light
    assert np.abs(difference).mean() < 8  # JPEG and WEBP lose a little
    assert np.array_equal(
        one_image(tmp_path / "cat" / name, 3, (32, 16)), pool.inputs[0]
    )  # as predict reads it


def test_ignores_damaged_exif(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6

    def save(path: Path) -> None:
        Image.new("RGB", (8, 4)).save(path, exif=exif)
        content = path.read_bytes()
        path.write_bytes(content.replace(b"MM\0*", b"ZZ\0*"))
        assert path.read_bytes() != content

    assert load_pool(folder_of(tmp_path, "a.webp", save)).input_shape == (3, 4, 8)


@pytest.mark.filterwarnings("error")
def test_colours_of_a_palette_with_transparent_ones(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    pool = load_pool(folder_of(tmp_path, "a.png", lambda path: image.save(path, transparency=b"\0\x80")))
    assert pool.inputs[0, :, 0].T.tolist() == [[10, 20, 30], [40, 50, 60]]
    with Image.open(tmp_path / "cat" / "a.png") as opened:
        inputs = decode_images([(opened, 0)], 1, np.empty, None, tmp_path, None)[0]
    assert np.array_equal(inputs[0], pool.inputs[0])


@pytest.mark.parametrize("name", ["0.png", "0.tif"])
def test_keeps_the_high_byte_of_16_bit_channels(tmp_path, name):
    values = np.array([[0, 255, 256], [1000, 60_000, 65_535]], dtype=np.uint16)
    pool = load_pool(folder_of(tmp_path, name, Image.fromarray(values).save))
    expected = [[0, 0, 1], [3, 234, 255]]
    assert pool.inputs.tolist() == [[expected] * 3] * 2
    assert one_image(tmp_path / "dog" / name, 1, (3, 2)).tolist() == [expected]  # what predict reads


@pytest.mark.parametrize(
    ("maxval", "magic", "expected"),
    [(65_535, "P5", [0, 1, 15]), (4095, "P5", [0, 16, 255]), (4095, "P2", [0, 16, 255])],
)
def test_keeps_the_high_byte_of_a_pgm_on_the_scale_of_its_header(tmp_path, maxval, magic, expected):
    def save(path: Path) -> None:
        values = [0, 258, 4095]
        raster = np.array(values, ">u2").tobytes() if magic == "P5" else " ".join(map(str, values)).encode()
        path.write_bytes(f"{magic} 3 1 {maxval}\n".encode() + raster)

    pool = load_pool(folder_of(tmp_path, "0.pgm", save))
    assert pool.inputs.tolist() == [[[expected]] * 3] * 2
    assert one_image(tmp_path / "dog" / "0.pgm", 1, (3, 1)).tolist() == [[expected]]


@pytest.mark.parametrize(("mode", "dtype"), [("I", np.int32), ("F", np.float32)])
def test_rejects_images_of_unknown_range(tmp_path, mode, dtype):
    settings = folder_of(tmp_path, "0.tif", Image.fromarray(np.full((2, 2), 1000, dtype)).save)
    with pytest.raises(PbflError, match=rf"0\.tif is an image of mode {mode}, whose value range is unknown"):
        load_pool(settings)


def test_the_first_of_opened_images_decides_between_grey_and_rgb(tmp_path):
    images = [(Image.new(mode, (2, 2)), 0) for mode in ("L", "RGB", "LA", "P")]
    inputs, _, notes = decode_images(images, 4, np.empty, None, tmp_path, None)
    assert inputs.shape == (4, 1, 2, 2)
    assert notes == ("2 of 4 images lost their colours, since the first image is grey",)
    inputs, _, notes = decode_images(images[::-1], 4, np.empty, None, tmp_path, None)
    assert (inputs.shape, notes) == ((4, 3, 2, 2), ())
    for mode in ("1", "LA", "I;16"):
        assert (
            decode_images([(Image.new(mode, (2, 2)), 0)], 1, np.empty, None, tmp_path, None)[0].shape[1] == 1
        )
    assert decode_images(images, 4, np.empty, None, tmp_path, 1)[2] == ()


@pytest.mark.parametrize("error", [OSError, SyntaxError, ValueError])  # what Pillow raises
def test_of_opened_images_a_damaged_one_is_named(tmp_path, error):
    def images():
        yield Image.new("L", (2, 2)), 0
        raise error("broken PNG file")

    with pytest.raises(PbflError, match="number 2 is not a readable image: broken PNG file"):
        decode_images(images(), 2, np.empty, None, tmp_path)


@pytest.mark.parametrize("pixels", [59, 29])  # Pillow warns above its limit, and raises above twice the limit
def test_refuses_an_image_of_too_many_pixels_before_decoding_it(tmp_path, write_image, monkeypatch, pixels):
    write_image(tmp_path / "cat" / "a.png", 3, (6, 10))
    write_image(tmp_path / "dog" / "b.png", 3, (4, 4))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    reason = rf"a\.png: Image size \(60 pixels\); must be at most {pixels} pixels"
    with pytest.raises(PbflError, match=reason):
        load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path), input_shape="3,4,4"))
    with pytest.raises(PbflError, match=reason):
        one_image(tmp_path / "cat" / "a.png", 3, (4, 4))


def test_refuses_inputs_of_more_values_than_a_task_has(tmp_path, write_image, monkeypatch):
    for name in ("cat/a.png", "dog/b.png"):
        write_image(tmp_path / "set" / name, 3, (6, 10))
    settings = DataSettings(dataset="image-folder", data_dir=str(tmp_path / "set"))
    monkeypatch.setattr("pbfl_flwr.data.cache.MAX_VALUES", 179)
    with pytest.raises(
        PbflError, match=r"an input of shape \(3, 10, 6\) has 180 values; must be at most 179"
    ):
        load_pool(settings)
    assert load_pool(settings.model_copy(update={"input_shape": "1,10,6"})).input_shape == (1, 10, 6)


@pytest.fixture
def hospitals(tmp_path, write_image):
    """Two clients, who have two of three classes each."""
    for n, name in enumerate(("north/cat/0", "north/dog/0", "north/dog/1", "south/cat/0", "south/emu/0")):
        write_image(tmp_path / "set" / f"{name}.png", 10 * n)
    return DataSettings(dataset="image-folder", data_dir=str(tmp_path / "set"))


def test_folders_of_the_wrong_level_are_refused(tmp_path, hospitals):
    reason = (
        r"the folders of .*set hold only folders, e\.g\. north/cat; must be <class>/\* with images.* natural"
    )
    with pytest.raises(PbflError, match=reason):
        load_pool(hospitals)
    with pytest.raises(PbflError, match=reason):
        load_pool(hospitals.model_copy(update={"labels": "north,south"}))
    (tmp_path / "set").rename(tmp_path / "train")  # also below train
    with pytest.raises(PbflError, match=r"the folders of .*train hold only folders"):
        load_pool(hospitals.model_copy(update={"data_dir": str(tmp_path)}))


def test_folders_of_clients(tmp_path, hospitals, write_image):
    natural = hospitals.model_copy(update={"partition": "natural"})
    pool = load_pool(natural)
    assert (pool.label_names, pool.labels.tolist()) == (("cat", "dog", "emu"), [0, 1, 1, 0, 2])
    assert pool.owner is not None
    assert pool.owner.tolist() == [0, 0, 0, 1, 1]
    assert pool.inputs[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40]
    part = check_data(natural, 2)
    assert (part.counts.tolist(), part.natural_ids) == ([[1, 2, 0], [1, 0, 1]], ("north", "south"))
    assert load_pool(natural.model_copy(update={"labels": "emu,cow,dog,cat"})).labels.tolist() == [
        3,
        2,
        2,
        3,
        0,
    ]
    with pytest.raises(PbflError, match=r"set/north has the class 'dog'; labels allows cat, emu"):
        load_pool(natural.model_copy(update={"labels": "cat,emu"}))
    one = natural.model_copy(update={"data_dir": str(tmp_path / "set" / "north" / "cat")})
    with pytest.raises(PbflError, match=r"must be <client>/<class>/\* .* it has no client"):
        load_pool(one)
    (tmp_path / "set" / "west" / "cat").mkdir(parents=True)
    with pytest.raises(PbflError, match=r"it has no image in the folders of 'west'"):
        load_pool(natural)
    write_image(tmp_path / "set" / "test" / "cat" / "0.png", 3)
    with pytest.raises(PbflError, match=r"no train and test; it has a folder 'test'"):
        load_pool(natural)


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["a/train/cat/0", "a/test/cat/0"], "a folder 'a/test'"),
        (["a/train/0", "a/test/0", "b/val/0"], "a folder 'a/test'"),  # the only classes
        (["a/cat/0", "a/dog/0", "b/cat/0", "b/Train/cat/0"], "a folder 'b/Train'"),
        (
            ["a/cat/0", "b/2024/cat/0", "b/2025/dog/0"],
            "images only further down, e.g. in .*/b/2024/cat; if '2024' is",
        ),
    ],
)
def test_what_is_no_class_of_a_client(tmp_path, write_image, paths, found):
    settings = DataSettings(dataset="image-folder", data_dir=str(tmp_path), partition="natural")
    for path in paths:
        write_image(tmp_path / f"{path}.png", 3)
    with pytest.raises(PbflError, match=f"no train and test; it has {found}"):
        load_pool(settings)
    named = settings.model_copy(update={"labels": "cat,dog,train,Train,test,val,2024,2025"})
    assert len(load_pool(named).labels) == len(paths)


def test_a_class_of_clients_may_be_called_test_and_have_folders(tmp_path, write_image):
    for path in ("a/control/day/0", "a/test/0", "b/test/day/0", "c/test/0"):
        write_image(tmp_path / "set" / f"{path}.png", 3)
    (tmp_path / "set" / "c" / "control").mkdir()
    settings = DataSettings(dataset="image-folder", data_dir=str(tmp_path / "set"), partition="natural")
    assert load_pool(settings).label_names == ("control", "test")


def test_files_of_clients_that_are_not_read_are_told(tmp_path, hospitals, write_image):
    natural = hospitals.model_copy(update={"partition": "natural"})
    for path in ("north/cat/0.heic", "south/emu/0.gif"):
        (tmp_path / "set" / path).touch()
    write_image(tmp_path / "set" / "south" / "beside.png", 3)
    write_image(tmp_path / "set" / "above.png", 3, (12, 12))
    write_image(tmp_path / "set" / "south" / "emu" / "large.png", 3, (12, 12))
    resized, note = load_pool(natural).notes
    assert resized.startswith("1 of 6 images were resized")
    assert note.startswith("4 files ignored that are not images (.jpg")


def test_images_beside_the_folders_of_classes_are_told(tmp_path, write_image):
    for path in ("train/cat/0", "train/dog/0", "train/1", "test/cat/0", "test/2", "3", ".4"):
        write_image(tmp_path / "set" / f"{path}.png", 3)
    (tmp_path / "set" / "README.txt").touch()
    (note,) = load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path / "set"))).notes
    assert note.startswith("3 files ignored")
    assert note.endswith("or that are images beside the folders of classes")


def test_folders_made_or_removed_after_the_first_reading_count(tmp_path, hospitals, write_image):
    natural = hospitals.model_copy(update={"partition": "natural"})
    before = load_pool(natural).label_names
    (tmp_path / "set" / "north" / "ant").mkdir()
    assert load_pool(natural).label_names == ("ant", *before)
    (tmp_path / "set" / "north" / "ant").rmdir()
    assert load_pool(natural).label_names == before
    one = natural.model_copy(update={"partition": "iid", "data_dir": str(tmp_path / "one")})
    for path in ("train/cat/a.png", "train/dog/b.png"):
        write_image(tmp_path / "one" / path, 3)
    assert load_pool(one).notes == ()
    (tmp_path / "one" / "val").mkdir()
    (tmp_path / "one" / "train" / "cat" / "b.heic").touch()
    ignored, unread = load_pool(one).notes
    assert ignored.startswith("1 files ignored")
    assert unread == "folders ignored next to train and test: val"


def test_a_class_without_an_image_is_named(tmp_path: Path, write_image: Any) -> None:
    for name in ("cat", "cow", "dog"):
        write_image(tmp_path / name / "0.png", 3)
    (tmp_path / "cow/0.png").rename(tmp_path / "cow/0.txt")
    with pytest.raises(PbflError, match=r"no image for the classes cow; .* should hold <class>/"):
        load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path)))
    for name in ("cat", "dog"):
        (tmp_path / name / "0.png").unlink()
    with pytest.raises(PbflError, match=f"^no image in {tmp_path}$"):
        load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path), labels="cat,cow,dog"))


def test_without_train_a_folder_test_is_a_class(tmp_path: Path, write_image: Any) -> None:
    for name in ("control", "test"):
        write_image(tmp_path / name / "0.png", 3)
        write_image(tmp_path / name / "more" / "1.png", 3)
    pool = load_pool(DataSettings(dataset="image-folder", data_dir=str(tmp_path)))
    assert (pool.label_names, pool.labels.tolist(), pool.num_train) == (("control", "test"), [0, 0, 1, 1], 4)
